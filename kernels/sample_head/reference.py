"""What `sample_head` means: all logits, all noise, then the best."""

import jax
import jax.numpy as jnp
import numpy as np
from adrl_kernels.noise import exponential_of_bits, hash_ids
from adrl_kernels.sample_head.arguments import Draws, Norm


def normalized(hidden: jax.Array, norm: Norm | None) -> jax.Array:
    """`hidden` `[M, H]` after the norm, in its own dtype."""
    if norm is None:
        return hidden
    wide = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    factor = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + norm.eps)
    return (wide * factor * norm.weight.astype(wide.dtype)).astype(hidden.dtype)


def bits(keys: jax.Array, vocab: int) -> jax.Array:
    """The random bits behind the noise: keys uint32 `[M, 2]` -> uint32 `[M, V]`."""
    return hash_ids(keys[:, :1], keys[:, 1:], np.arange(vocab, dtype=np.uint32))


def draw(logits: jax.Array, keys: jax.Array, temperature: jax.Array, draws: int) -> Draws:
    """Draws from logits `[M, V]`, -inf where an id is not valid."""
    greedy = (temperature == 0)[:, None]
    scaled = logits / jnp.where(greedy, 1, temperature[:, None]).astype(logits.dtype)
    noise = -jnp.log(exponential_of_bits(bits(keys, logits.shape[1])))
    scores, ids = jax.lax.top_k(scaled + jnp.where(greedy, 0, noise), draws)
    total = jax.nn.logsumexp(scaled, axis=1)
    log_probs = jnp.take_along_axis(scaled, ids, axis=1) - total[:, None]
    limit = jnp.where(jnp.arange(draws) == 0, 0.0, -jnp.inf)
    return Draws(ids.astype(jnp.int32), scores, jnp.where(greedy, limit, log_probs), total)


def sample_head(
    hidden: jax.Array,
    weight: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    *,
    by_row: bool,
    valid_vocab: int,
    draws: int,
    norm: Norm | None,
    precision: str | None = "highest",
) -> Draws:
    """Arguments and result as in `api.sample_head`."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    hidden = normalized(hidden, norm)
    if precision is not None:
        hidden, weight = hidden.astype(wide), weight.astype(wide)
    contract = (((1,), (1 if by_row else 0,)), ((), ()))
    logits = jax.lax.dot_general(hidden, weight, contract, precision=precision, preferred_element_type=wide)
    logits = jnp.where(jnp.arange(logits.shape[1]) < valid_vocab, logits, -jnp.inf)
    return draw(logits, keys, temperature, draws)
