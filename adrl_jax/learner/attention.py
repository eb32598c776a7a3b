"""Attention inside packed rows: exact for any packing, skipping most of what the packing forbids.

Shapes: `M` rows of `T` tokens, `N` query heads, `K` key-value heads, `G = N / K`, `D` head size.

Queries are handled in blocks. A block meets the keys up to its own end, and of those only the row's first `shared` ones (a
prompt) and those at most `lookback` before the block (the own response, or segment), so that the work follows the lengths of
segments and not the length of rows. Between the passes only queries, keys, values, the result and one number a query are
kept; the backward pass computes the weights again (FlashAttention-2, arXiv 2307.08691, algorithm 2).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.learner.remat import runtime_one
from adrl_jax.types import PackedBatch

BLOCK = 128
_TOGETHER = 2**26  # scores (256 MB of float32) that may exist at once
_FAR = -1e30  # finite, so that a query that sees nothing (padding) averages instead of giving NaN


@dataclasses.dataclass(frozen=True)
class Reach:
    """Which keys a block of queries has to meet, for all rows of a batch. Static: each value is a program of its own.

    Attributes:
        shared: the first `shared` tokens of a row are met by everybody.
        lookback: so are the last `lookback` before the block; None means all of them.
    """

    shared: int = 0
    lookback: int | None = None

    def spans(self, start: int, end: int) -> list[tuple[int, int]]:
        """The (start, end) of the keys that queries start … end - 1 meet."""
        near = 0 if self.lookback is None else max(0, start - self.lookback)
        if self.shared == 0:
            return [(near, end)]
        return [(0, self.shared), (near, end)] if self.shared < near else [(0, end)]


def reach_of(batch: PackedBatch) -> Reach:
    """The cheapest `Reach` that covers a batch (numpy leaves), rounded up so that few values occur."""
    segments, branches = np.asarray(batch.segment_ids), np.asarray(batch.branch_ids)
    length = segments.shape[1]
    places = np.broadcast_to(np.arange(length), segments.shape)

    def first_of_run(ids):
        changed = np.concatenate([np.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
        return np.maximum.accumulate(np.where(changed, places, 0), axis=1)

    segment_start = first_of_run(segments)
    branch_start = np.maximum(first_of_run(branches), segment_start)
    prompt = (branches == 0) & (segments != 0)
    prompt_end = np.maximum.accumulate(np.where(prompt, places + 1, 0), axis=1)
    block_start, real = places // BLOCK * BLOCK, segments != 0

    def lookback(shared):
        # A prompt that lies within the shared keys needs no looking back for.
        first = np.where(prompt_end > shared, np.maximum(segment_start, shared), np.maximum(branch_start, shared))
        needed = int(np.max(np.where(real, block_start - first, 0), initial=0))
        return _bucket(max(needed, 0))

    first_prompts = np.where((segments == 1) & prompt, places + 1, 0)
    options = [Reach(shared, lookback(shared)) for shared in {0, _bucket(int(first_prompts.max(initial=0)))}]
    best = min(options, key=lambda r: (_keys(r, length), r.shared))
    return best if _keys(best, length) < 0.9 * _keys(Reach(), length) else Reach()


def _bucket(value: int) -> int:
    """`value` rounded up to 0, 1, 2, 3, 4, 6, 8, 12, … half blocks."""
    half, bucket = BLOCK // 2, 0
    while bucket * half < value:
        bucket = {0: 1, 1: 2, 2: 3}.get(bucket) or (bucket * 4 // 3 if bucket % 3 == 0 else bucket * 3 // 2)
    return bucket * half


def _keys(reach: Reach, length: int) -> int:
    return sum((e - s) * (end - start) for start, end in _blocks(length) for s, e in reach.spans(start, end))


def visible(queries, keys, window: int | None = None) -> jax.Array:
    """Which key each query may see: bool `[M, t, s]`.

    Same segment (and not padding), no later in the row, and prompt or own branch; with `window`, also fewer than `window`
    positions back within the own sequence.

    Args:
        queries, keys: (segment ids, branch ids, positions, places in the row), int32 `[M, t]` and `[M, s]` each.
    """
    segment, branch, position, place = (x[:, :, None] for x in queries)
    key_segment, key_branch, key_position, key_place = (x[:, None, :] for x in keys)
    seen = (segment == key_segment) & (segment != 0) & (key_place <= place)
    seen &= (key_branch == 0) | (key_branch == branch)
    if window is not None:
        seen &= key_position > position - window
    return seen


def packed_attention(segment_ids: jax.Array, branch_ids: jax.Array, positions: jax.Array, *, reach: Reach | None = None):
    """An `attend` for `Transformer` over packed rows.

    The model may be called with the rows laid end to end, as `[1, M * T]` tokens: all its matrix products are then plain
    two-dimensional ones, and only this function knows about rows.

    Args:
        segment_ids, branch_ids, positions: int32 `[M, T]`, as in `PackedBatch`.
        reach: from `reach_of`; None meets every key up to the end of the query's block.
    """
    rows, length = segment_ids.shape
    ids = (segment_ids, branch_ids, positions, jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length)))

    def attend(q, k, v, *, layer, window, cache):
        shape, heads, kv_heads, dim = q.shape, q.shape[2], k.shape[2], q.shape[3]
        # [M, K, T, G * D]: the query heads of a key-value head are rows of the same product, side by side for each token.
        q = q.reshape(rows, length, kv_heads, heads // kv_heads * dim).swapaxes(1, 2)
        k = k.reshape(rows, length, kv_heads, dim).swapaxes(1, 2)
        v = v.reshape(rows, length, kv_heads, dim).swapaxes(1, 2)
        out = _attention((reach or Reach(), window), q, k, v, ids)
        return out.swapaxes(1, 2).reshape(shape), cache

    return attend


def _blocks(length: int) -> list[tuple[int, int]]:
    """(start, end) of the query blocks of a row; at most 16, so that long rows do not make long programs."""
    size = max(BLOCK, -(-length // (16 * BLOCK)) * BLOCK)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _take(x, spans, axis):
    parts = [jax.lax.slice_in_dim(x, start, end, axis=axis) for start, end in spans]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def _by_head(x, dim):
    """`[M, K, t, G * D]` to `[M, K, t * G, D]`."""
    return x.reshape(*x.shape[:2], -1, dim)


def _waits(static, q, k) -> bool:
    """Whether each block begins only when the one before is done. Else the compiler may work on all at once, which is faster by
    little and needs the scores of the whole row: 1.3 GB a layer where SmolLM2-135M reads a row of 8192 tokens."""
    rows, _, length, width = q.shape
    return rows * _keys(static[0], length) * k.shape[1] * (width // k.shape[3]) > _TOGETHER


def _scores(static, q, k, ids, block, spans):
    """Masked float32 scores `[M, K, t, G, s]` of the queries `q` `[M, K, t, G * D]` of a block against the keys in `spans`."""
    dim = k.shape[-1]
    k = _take(k, spans, 2)
    scores = jnp.einsum("mkrd,mksd->mkrs", _by_head(q, dim), k, preferred_element_type=jnp.float32)
    scores = scores.reshape(*q.shape[:3], -1, k.shape[2])
    seen = visible([_take(x, [block], 1) for x in ids], [_take(x, spans, 1) for x in ids], static[1])
    return jnp.where(seen[:, None, :, None], scores, _FAR)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static, q, k, v, ids):
    return _forward(static, q, k, v, ids)[0]


def _forward(static, q, k, v, ids):
    outs, normalisers = [], []
    waits = _waits(static, q, k)
    for block in _blocks(q.shape[2]):
        spans = static[0].spans(*block)
        part = _take(q, [block], 2)
        if waits and outs:
            part *= runtime_one(outs[-1])
        scores = _scores(static, part, k, ids, block, spans)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        rows = weights.reshape(*weights.shape[:2], -1, weights.shape[-1]).astype(v.dtype)
        out = jnp.einsum("mkrs,mksd->mkrd", rows, _take(v, spans, 2), preferred_element_type=jnp.float32)
        out = out.reshape(*total.shape[:-1], -1) / total
        outs.append(out.reshape(*out.shape[:3], -1).astype(v.dtype))
        normalisers.append((top + jnp.log(total))[..., 0])
    return jnp.concatenate(outs, axis=2), jnp.concatenate(normalisers, axis=2)


def _attention_fwd(static, q, k, v, ids):
    out, normaliser = _forward(static, q, k, v, ids)
    return out, (q, k, v, ids, out, normaliser)


def _attention_bwd(static, saved, d_out):
    q, k, v, ids, out, normaliser = saved
    dim = k.shape[-1]
    # Else the compiler recognises the scores of the forward pass and keeps them, T^2 numbers a head.
    k_again = k * runtime_one(d_out).astype(k.dtype)
    # sum_s weight_s d_weight_s, which the softmax's derivative subtracts, is the dot of result and cotangent.
    shared = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).reshape(*q.shape[:3], -1, dim)
    shared = jnp.sum(shared, axis=-1, keepdims=True)
    d_q = []
    # [M, K, D, T]: products that leave the long axis last run a third faster on CPU.
    d_k = d_v = jnp.zeros((*k.shape[:2], dim, k.shape[2]), jnp.float32)
    waits = _waits(static, q, k)
    for block in _blocks(q.shape[2]):
        spans = static[0].spans(*block)
        part, d_part = _take(q, [block], 2), _take(d_out, [block], 2)
        if waits and d_q:
            done = runtime_one(d_q[-1]) * runtime_one(d_k) * runtime_one(d_v)
            part, d_part = part * done.astype(part.dtype), d_part * done.astype(d_part.dtype)
        weights = jnp.exp(_scores(static, part, k_again, ids, block, spans) - _take(normaliser, [block], 2)[..., None])
        part, d_part = _by_head(part, dim), _by_head(d_part, dim)
        d_weights = jnp.einsum("mkrd,mksd->mkrs", d_part, _take(v, spans, 2), preferred_element_type=jnp.float32)
        d_scores = weights * (d_weights.reshape(weights.shape) - _take(shared, [block], 2))
        weights = weights.reshape(d_weights.shape).astype(v.dtype)
        d_scores = d_scores.reshape(d_weights.shape).astype(v.dtype)
        d_rows = jnp.einsum("mkrs,mksd->mkrd", d_scores, _take(k, spans, 2), preferred_element_type=jnp.float32)
        d_q.append(d_rows.reshape(*q.shape[:2], block[1] - block[0], -1))
        d_k = _add_spans(d_k, jnp.einsum("mkrd,mkrs->mkds", part, d_scores, preferred_element_type=jnp.float32), spans)
        d_v = _add_spans(d_v, jnp.einsum("mkrd,mkrs->mkds", d_part, weights, preferred_element_type=jnp.float32), spans)
    d_k, d_v = d_k.swapaxes(2, 3).astype(k.dtype), d_v.swapaxes(2, 3).astype(v.dtype)
    return jnp.concatenate(d_q, axis=2).astype(q.dtype), d_k, d_v, None


def _add_spans(total, part, spans):
    """Adds `part` `[…, s]` to the places of `total` `[…, T]` that `spans` name."""
    at = 0
    for start, end in spans:
        total = total.at[..., start:end].add(part[..., at : at + end - start])
        at += end - start
    return total


_attention.defvjp(_attention_fwd, _attention_bwd)
