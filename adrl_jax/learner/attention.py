"""Attention inside packed rows: exact for any packing, skipping what causality forbids, keeping little for the backward pass.

Shapes: `M` rows of `T` tokens, `N` query heads, `K` key-value heads, `G = N / K`, `D` head size.

Between the passes only queries, keys, values, the result and one number a query are kept; the backward pass computes the
weights again (FlashAttention-2, arXiv 2307.08691, algorithm 2, with blocks of queries only).
"""

import functools

import jax
import jax.numpy as jnp

from adrl_jax.learner.remat import runtime_one

_FAR = -1e30  # finite, so that a query that sees nothing (padding) averages instead of giving NaN


def visible(segment_ids: jax.Array, branch_ids: jax.Array, positions: jax.Array, window: int | None = None) -> jax.Array:
    """Which key each query may see: bool `[M, T, T]` (query, key).

    Same segment (and not padding), no later in the row, and prompt or own branch; with `window`, also fewer than `window`
    positions back within the own sequence.
    """
    t = segment_ids.shape[1]
    seen = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids[:, :, None] != 0)
    seen &= (branch_ids[:, None, :] == 0) | (branch_ids[:, :, None] == branch_ids[:, None, :])
    seen &= jnp.tril(jnp.ones((t, t), bool))
    if window is not None:
        seen &= positions[:, None, :] > positions[:, :, None] - window
    return seen


def packed_attention(segment_ids: jax.Array, branch_ids: jax.Array, positions: jax.Array, *, query_blocks: int = 4):
    """An `attend` for `Transformer` over packed rows.

    The model may be called with the rows laid end to end, as `[1, M * T]` tokens: all its matrix products are then plain
    two-dimensional ones, and only this function knows about rows.

    Args:
        segment_ids, branch_ids, positions: int32 `[M, T]`, as in `PackedBatch`.
        query_blocks: queries are handled in this many blocks (of at least 64); keys after a block's end are skipped.
    """
    rows, length = segment_ids.shape
    block = min(length, max(64, -(-length // query_blocks)))

    def attend(q, k, v, *, layer, window, cache):
        shape, heads, kv_heads, dim = q.shape, q.shape[2], k.shape[2], q.shape[3]
        # [M, K, T, G * D]: the query heads of a key-value head are rows of the same product, side by side for each token.
        q = q.reshape(rows, length, kv_heads, heads // kv_heads * dim).swapaxes(1, 2)
        k = k.reshape(rows, length, kv_heads, dim).swapaxes(1, 2)
        v = v.reshape(rows, length, kv_heads, dim).swapaxes(1, 2)
        out = _attention(block, q, k, v, visible(segment_ids, branch_ids, positions, window))
        return out.swapaxes(1, 2).reshape(shape), cache

    return attend


def _spans(length: int, block: int):
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def _by_head(x, dim):
    """`[M, K, t, G * D]` to `[M, K, t * G, D]`."""
    return x.reshape(*x.shape[:2], -1, dim)


def _scores(q, k, seen):
    """Masked float32 scores `[M, K, t, G, s]` of queries `[M, K, t, G * D]`."""
    dim, keys = k.shape[-1], k.shape[2]
    scores = jnp.einsum("mkrd,mksd->mkrs", _by_head(q, dim), k, preferred_element_type=jnp.float32)
    scores = scores.reshape(*q.shape[:3], -1, keys)
    return jnp.where(seen[:, None, :, None], scores, _FAR)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(block, q, k, v, seen):
    return _forward(block, q, k, v, seen)[0]


def _forward(block, q, k, v, seen):
    outs, normalisers = [], []
    for start, end in _spans(q.shape[2], block):
        part = q[:, :, start:end]
        scores = _scores(part, k[:, :, :end], seen[:, start:end, :end])
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        rows = weights.reshape(*weights.shape[:2], -1, end).astype(v.dtype)
        out = jnp.einsum("mkrs,mksd->mkrd", rows, v[:, :, :end], preferred_element_type=jnp.float32)
        out = out.reshape(*total.shape[:-1], -1) / total
        outs.append(out.reshape(part.shape).astype(v.dtype))
        normalisers.append((top + jnp.log(total))[..., 0])
    return jnp.concatenate(outs, axis=2), jnp.concatenate(normalisers, axis=2)


def _attention_fwd(block, q, k, v, seen):
    out, normaliser = _forward(block, q, k, v, seen)
    return out, (q, k, v, seen, out, normaliser)


def _attention_bwd(block, saved, d_out):
    q, k, v, seen, out, normaliser = saved
    dim = k.shape[-1]
    # Else the compiler recognises the scores of the forward pass and keeps them, T^2 numbers a head.
    k_again = k * runtime_one(d_out).astype(k.dtype)
    grouped = (*q.shape[:3], -1, dim)
    # sum_s weight_s d_weight_s, which the softmax's derivative subtracts, is the dot of result and cotangent.
    shared = jnp.sum((out.astype(jnp.float32) * d_out.astype(jnp.float32)).reshape(grouped), axis=-1, keepdims=True)
    d_q = []
    d_k, d_v = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for start, end in _spans(q.shape[2], block):
        part, d_part = q[:, :, start:end], _by_head(d_out[:, :, start:end], dim)
        weights = jnp.exp(_scores(part, k_again[:, :, :end], seen[:, start:end, :end]) - normaliser[:, :, start:end, :, None])
        d_weights = jnp.einsum("mkrd,mksd->mkrs", d_part, v[:, :, :end], preferred_element_type=jnp.float32)
        d_scores = weights * (d_weights.reshape(weights.shape) - shared[:, :, start:end])
        weights = weights.reshape(*weights.shape[:2], -1, end).astype(v.dtype)
        d_scores = d_scores.reshape(weights.shape).astype(v.dtype)
        d_q.append(
            jnp.einsum("mkrs,mksd->mkrd", d_scores, k[:, :, :end], preferred_element_type=jnp.float32).reshape(part.shape)
        )
        d_k = d_k.at[:, :, :end].add(
            jnp.einsum("mkrs,mkrd->mksd", d_scores, _by_head(part, dim), preferred_element_type=jnp.float32)
        )
        d_v = d_v.at[:, :, :end].add(jnp.einsum("mkrs,mkrd->mksd", weights, d_part, preferred_element_type=jnp.float32))
    return jnp.concatenate(d_q, axis=2).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attention.defvjp(_attention_fwd, _attention_bwd)
