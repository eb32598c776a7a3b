"""`log_probs` as XLA operations: the vocabulary is walked in blocks of `[U, block]` logits.

The forward pass keeps a running maximum and sums, the backward pass computes each block again. What is kept between the two
is `[U]`. Logits, log-softmax and sums are float32 whatever the compute dtype.

Shapes: `U` targets, `H` hidden size, `V` vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

_BLOCK_ELEMENTS = 4 * 1024 * 1024  # 16 MB of float32 logits: stays within a shared cache
_FAR = -1e30


class Static(NamedTuple):
    """What is known when a program is compiled.

    Attributes:
        by_row: whether the projection is stored `[V, H]` rather than `[H, V]`.
        valid: ids at or past it have probability 0.
        block: ids handled together.
        scale: logits are multiplied by it, 1 / temperature.
        entropy_gradient: whether the entropy may be differentiated.
    """

    by_row: bool
    valid: int
    block: int
    scale: float
    entropy_gradient: bool


def default_block(targets: int) -> int:
    """How many ids to handle together for a number of targets: a multiple of 512."""
    return max(512, _BLOCK_ELEMENTS // max(1, targets) // 512 * 512)


def blocks(valid: int, block: int) -> list[tuple[int, int]]:
    """(start, stop) of the blocks that cover ids 0 … valid - 1."""
    return [(start, min(start + block, valid)) for start in range(0, valid, block)]


def columns(matrix: jax.Array, by_row: bool, start: int, stop: int) -> jax.Array:
    """The part of the output projection that belongs to ids start … stop - 1."""
    return matrix[start:stop] if by_row else matrix[:, start:stop]


def block_logits(hidden: jax.Array, part: jax.Array, by_row: bool, scale: float) -> jax.Array:
    """Float32 logits `[U, block]` times `scale` (1 / temperature)."""
    contract = (((1,), (1,)), ((), ())) if by_row else (((1,), (0,)), ((), ()))
    out = jax.lax.dot_general(hidden, part.astype(hidden.dtype), contract, preferred_element_type=jnp.float32)
    return out * scale if scale != 1.0 else out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_log_probs(static: Static, matrix: jax.Array, hidden: jax.Array, target_ids: jax.Array):
    """Log-probs and entropies, float32 `[U]` each; arguments as in `api.token_log_probs`."""
    return _forward(static, matrix, hidden, target_ids)[0]


def _over_blocks(step, state, valid: int, block: int):
    """`state = step(state, start, size)` over the blocks of ids 0 … valid - 1.

    The first block and a shorter last one stand alone, those between are a loop: unrolled, the compiler would gather what
    all of them add at the end, and keep the logits of the whole vocabulary until then.
    """
    whole, rest = divmod(valid, block)
    state = step(state, 0, block)
    if whole > 1:
        state = jax.lax.fori_loop(1, whole, lambda i, state: step(state, i * block, block), state)
    return step(state, whole * block, rest) if rest else state


def _columns(matrix: jax.Array, by_row: bool, start, size: int) -> jax.Array:
    """As `columns`, from a `start` that only the running program knows."""
    return jax.lax.dynamic_slice_in_dim(matrix, start, size, axis=0 if by_row else 1)


def _forward(static, matrix, hidden, target_ids):
    by_row, valid, block, scale, _ = static
    u = hidden.shape[0]

    def step(state, start, size):
        top, total, weighted, chosen = state
        scores = block_logits(hidden, _columns(matrix, by_row, start, size), by_row, scale)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink = jnp.exp(top - new_top)
        shifted = scores - new_top[:, None]
        weights = jnp.exp(shifted)
        # `weighted` sums w (s - top): entropies are differences of like numbers, so keep them small.
        weighted = shrink * (weighted + total * (top - new_top)) + jnp.sum(weights * shifted, axis=1)
        total = shrink * total + jnp.sum(weights, axis=1)
        inside = (target_ids >= start) & (target_ids < start + size)
        local = jnp.clip(target_ids - start, 0, size - 1)
        chosen = jnp.where(inside, jnp.take_along_axis(scores, local[:, None], axis=1)[:, 0], chosen)
        return new_top, total, weighted, chosen

    nothing = (jnp.full(u, _FAR), jnp.zeros(u), jnp.zeros(u), jnp.full(u, _FAR))
    top, total, weighted, chosen = _over_blocks(step, nothing, valid, block)
    log_total = jnp.log(total)
    entropy = log_total - weighted / total
    return (chosen - top - log_total, entropy), (top + log_total, entropy)


def _fwd(static, matrix, hidden, target_ids):
    out, (normaliser, entropy) = _forward(static, matrix, hidden, target_ids)
    return out, (matrix, hidden, target_ids, normaliser, entropy)


def _bwd(static, saved, cotangents):
    by_row, valid, block, scale, entropy_gradient = static
    matrix, hidden, target_ids, normaliser, entropy = saved
    g, g_entropy = cotangents
    axis = 0 if by_row else 1

    def step(state, start, size):
        d_hidden, d_matrix = state
        part = _columns(matrix, by_row, start, size)
        log_law = block_logits(hidden, part, by_row, scale) - normaliser[:, None]
        law = jnp.exp(log_law)
        is_target = target_ids[:, None] - start == jnp.arange(size, dtype=jnp.int32)
        d_scores = g[:, None] * (is_target - law)
        if entropy_gradient:
            d_scores -= g_entropy[:, None] * law * (log_law + entropy[:, None])
        d_scores = (d_scores * scale).astype(hidden.dtype)
        part = part.astype(hidden.dtype)
        d_hidden += jnp.matmul(d_scores, part if by_row else part.T, preferred_element_type=jnp.float32)
        left, right = (d_scores, hidden) if by_row else (hidden, d_scores)
        d_part = jnp.matmul(left.T, right, preferred_element_type=jnp.float32).astype(matrix.dtype)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_matrix, d_part, start, axis)

    nothing = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(matrix))
    d_hidden, d_matrix = _over_blocks(step, nothing, valid, block)
    return d_matrix, d_hidden.astype(hidden.dtype), None


token_log_probs.defvjp(_fwd, _bwd)
