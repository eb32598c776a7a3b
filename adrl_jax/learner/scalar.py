"""A transformer with one number at each place instead of a law: value models and reward models.

`M` rows, `T` tokens, `U` targets a row, `H` hidden size. Parameters: {"body": a policy's own, "head": {"kernel": [H], "bias": []}}; the
body's vocabulary projection is not used.
"""

from typing import Any

import jax
import jax.numpy as jnp

from adrl_jax.learner.attention import Reach, reach_of
from adrl_jax.learner.forward import hidden_states, source_hidden
from adrl_jax.models.families import ModelConfig
from adrl_jax.types import PackedBatch


def from_policy(params: Any, key: jax.Array, scale: float = 1.0) -> Any:
    """A scalar model on a copy of a policy's weights, with a fresh head of deviation scale / sqrt(H + 1) and bias 0.

    An untied output projection is left out.
    """
    body = {name: jax.tree.map(jnp.array, leaf) for name, leaf in params.items() if name != "head"}
    width = params["embedding"].shape[1]
    kernel = jax.random.normal(key, (width,), jnp.float32) * (scale / (width + 1) ** 0.5)
    return {"body": body, "head": {"kernel": kernel, "bias": jnp.float32(0.0)}}


def _head(params: Any, hidden: jax.Array) -> jax.Array:
    return hidden.astype(jnp.float32) @ params["head"]["kernel"] + params["head"]["bias"]


def scalars(
    params: Any, batch: PackedBatch, *, config: ModelConfig, reach: Reach | None = None, remat: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The scalar before each target (at its source place) and after it (at its own place), float32 `[M, U]` each."""
    hidden = hidden_states(params["body"], config, batch, reach=reach, remat=remat)
    after = jnp.take_along_axis(hidden, batch.target_index[..., None], axis=1)
    return _head(params, source_hidden(hidden, batch)), _head(params, after)


def make_scalars(config: ModelConfig):
    """`scalars(params, batch) -> (before, after)`, float32 `[M, U]` each: the forward pass alone, jitted."""
    jitted = jax.jit(lambda params, batch, reach: scalars(params, batch, config=config, reach=reach), static_argnums=2)
    return lambda params, batch: jitted(params, batch, reach_of(batch))
