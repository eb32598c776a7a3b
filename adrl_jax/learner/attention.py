"""Attention inside packed rows: exact for any packing, and skipping what causality forbids.

Shapes: `M` rows of `T` tokens, `N` query heads, `K` key-value heads, `D` head size.
"""

import jax
import jax.numpy as jnp

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


def packed_attention(segment_ids: jax.Array, branch_ids: jax.Array, positions: jax.Array, *, query_block: int = 128):
    """An `attend` for `Transformer` over packed rows.

    The model may be called with the rows laid end to end, as `[1, M * T]` tokens: all its matrix products are then plain
    two-dimensional ones, and only this function knows about rows.

    Args:
        segment_ids, branch_ids, positions: int32 `[M, T]`, as in `PackedBatch`.
        query_block: queries handled together; keys after the block's end are skipped.
    """
    rows, length = segment_ids.shape

    def attend(q, k, v, *, layer, window, cache):
        shape, heads, kv_heads, dim = q.shape, q.shape[2], k.shape[2], q.shape[3]
        seen = visible(segment_ids, branch_ids, positions, window)
        # [M, K, G, T, D]: the query heads of a key-value head side by side, one large product each.
        q = q.reshape(rows, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)
        k = k.reshape(rows, length, kv_heads, dim).transpose(0, 2, 1, 3)
        v = v.reshape(rows, length, kv_heads, dim).transpose(0, 2, 1, 3)
        blocks = []
        for start in range(0, length, query_block):
            end = min(start + query_block, length)
            blocks.append(_block(q[:, :, :, start:end], k[:, :, :end], v[:, :, :end], seen[:, start:end, :end]))
        out = jnp.concatenate(blocks, axis=3).transpose(0, 3, 1, 2, 4)
        return out.reshape(shape), cache

    return attend


def _block(q, k, v, seen):
    scores = jnp.einsum("mkgtd,mksd->mkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores, _FAR)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("mkgts,mksd->mkgtd", weights, v)
