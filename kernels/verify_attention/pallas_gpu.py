"""`verify_attention` on NVIDIA Hopper through Mosaic GPU. Lowered and interpreted on CPUs so far; no GPU has run it.

Flash decoding (Dao et al. 2023): a block of threads handles one row, one key-value head, up to 64 rows of queries (a group's heads
and nodes folded together) and one share of the cache, so that short batches fill the chip. Tiles of keys and values come by
asynchronous copies, `_SLOTS` of them in flight, and meet the tensor cores; weights and sums stay in registers. Shares
and the small block of fresh nodes are joined by XLA, a few numbers a query.

What lies past a row's end within its last tile is multiplied by weights of 0, so it must be finite: an engine's cache, which
starts at zero, is.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from adrl_kernels.mosaic_gpu import COLUMN, MATRIX, ROWS, SWIZZLED, across, full, iota
from adrl_kernels.plan import cdiv, round_up
from adrl_kernels.verify_attention.arguments import Cache, Nodes
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

MAX_NODES = 64
_TILE = 64  # tokens
_SLOTS = 2
_PROCESSORS = 132
_MASKED = -1e30


def problem(nodes: Nodes, cache: Cache) -> str | None:
    """What keeps the kernel from doing this call, None where nothing does."""
    _, count, _, dim = nodes.queries.shape
    if nodes.queries.dtype != jnp.bfloat16:
        return f"queries are {nodes.queries.dtype}; bfloat16 is supported"
    if cache.quantized:
        return "the cache is int8; bfloat16 is supported"
    if dim not in (64, 128):
        return f"head size {dim}; 64 and 128 are supported"
    if nodes.first is not None:
        return "nodes.first is given; sliding windows are not supported"
    if not 1 <= count <= MAX_NODES:
        return f"{count} nodes a row; 1 to {MAX_NODES} are supported"
    if cache.table is not None and cache.keys.shape[3] % _TILE:
        return f"pages of {cache.keys.shape[3]} tokens; multiples of {_TILE} are supported"
    if cache.table is None and cache.keys.shape[3] % _TILE:
        return f"a capacity of {cache.keys.shape[3]} tokens; multiples of {_TILE} are supported"
    return None


def shares(batch: int, kv_heads: int, tiles_of_rows: int, capacity: int) -> int:
    """Into how many shares a row's cache is split: enough to fill the chip, none shorter than four tiles."""
    wanted = cdiv(_PROCESSORS, batch * kv_heads * tiles_of_rows)
    return max(1, min(wanted, cdiv(capacity, 4 * _TILE)))


def _kernel(*refs, dim, tile, shares, row_tiles, page_tiles, interpreted):
    lengths, table, q, keys, values, out, top, total = refs[:8]
    q_smem, k_smem, v_smem, weights_smem, sums_smem, top_smem, total_smem, q_barrier, k_barriers, v_barriers = refs[8:]
    b, share = jax.lax.axis_index("row"), jax.lax.axis_index("share")
    head = jax.lax.div(jax.lax.axis_index("head"), row_tiles)
    part = jax.lax.rem(jax.lax.axis_index("head"), row_tiles)
    rows = pl.ds(part * ROWS, ROWS)
    end = lengths[b]
    tiles = jax.lax.div(end + tile - 1, tile)
    per_share = jax.lax.div(tiles + shares - 1, shares)
    begin = share * per_share
    steps = jnp.clip(tiles - begin, 0, per_share)

    def fetch(step, slot):
        place = begin + step
        if page_tiles is None:
            row, place = b, place
        else:
            row = table[b, jax.lax.div(place, page_tiles)]
            place = jax.lax.rem(place, page_tiles)
        at = pl.ds(place * tile, tile)
        plgpu.copy_gmem_to_smem(keys.at[row, head, :, at], k_smem.at[slot], k_barriers.at[slot])
        plgpu.copy_gmem_to_smem(values.at[row, head, at, :], v_smem.at[slot], v_barriers.at[slot])

    plgpu.copy_gmem_to_smem(q.at[b, head, rows, :], q_smem, q_barrier)
    for slot in range(_SLOTS):
        pl.when(slot < steps)(functools.partial(fetch, slot, slot))
    plgpu.barrier_wait(q_barrier)

    start = (
        full((ROWS, dim), 0.0, MATRIX, interpreted),
        full((ROWS,), _MASKED, COLUMN, interpreted),
        full((ROWS,), 0.0, COLUMN, interpreted),
    )

    def body(step, carry):
        mixed, highest, sums = carry
        slot = jax.lax.rem(step, _SLOTS)
        plgpu.barrier_wait(k_barriers.at[slot])

        def multiply(acc):
            plgpu.wgmma(acc, q_smem, k_smem.at[slot])
            return acc[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, tile), jnp.float32))
        place = iota((ROWS, tile), 1, interpreted) + (begin + step) * tile
        seen = place < end
        scores = jnp.where(seen, scores, _MASKED)
        new = jnp.maximum(highest, scores.max(axis=1))
        shrink = jnp.exp(highest - new)
        weights = jnp.where(seen, jnp.exp(scores - across(new, scores.shape)), 0.0)
        sums = sums * shrink + weights.sum(axis=1)
        weights_smem[...] = weights.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.barrier_wait(v_barriers.at[slot])

        def accumulate(acc):
            plgpu.wgmma(acc, weights_smem, v_smem.at[slot])
            return acc[...]

        fresh = pl.run_scoped(accumulate, plgpu.ACC((ROWS, dim), jnp.float32))
        mixed = mixed * across(shrink, mixed.shape) + fresh
        # Both products have been waited for: the slot is free.
        pl.when(step + _SLOTS < steps)(functools.partial(fetch, step + _SLOTS, slot))
        return mixed, new, sums

    mixed, highest, sums = jax.lax.fori_loop(0, steps, body, start)
    sums_smem[...], top_smem[...], total_smem[...] = mixed, highest, sums
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(sums_smem, out.at[b, share, head, rows, :])
    plgpu.copy_smem_to_gmem(top_smem, top.at[b, share, head, rows])
    plgpu.copy_smem_to_gmem(total_smem, total.at[b, share, head, rows])
    plgpu.wait_smem_to_gmem(0)


def past(q, cache: Cache, lengths, *, interpret: Any = False):
    """The committed tokens' part: sums of values `[B, shares, K, R, D]`, maxima and sums of weights `[B, shares, K, R]`, float32.

    Args:
        q: `[B, K, R, D]`, R a multiple of 64.
    """
    batch, kv_heads, count, dim = q.shape
    row_tiles = count // ROWS
    split = shares(batch, kv_heads, row_tiles, cache.capacity)
    struct = jax.ShapeDtypeStruct
    numbers = struct((batch, split, kv_heads, count), jnp.float32)
    kernel = functools.partial(
        _kernel,
        dim=dim,
        tile=_TILE,
        shares=split,
        row_tiles=row_tiles,
        page_tiles=None if cache.table is None else cache.keys.shape[3] // _TILE,
        interpreted=interpret is not False,
    )
    run = plgpu.kernel(
        kernel,
        out_type=[struct((batch, split, kv_heads, count, dim), jnp.float32), numbers, numbers],
        grid=(split, kv_heads * row_tiles, batch),
        grid_names=("share", "head", "row"),
        scratch_types=[
            plgpu.SMEM((ROWS, dim), jnp.bfloat16, transforms=SWIZZLED),
            plgpu.SMEM((_SLOTS, dim, _TILE), jnp.bfloat16, transforms=SWIZZLED),
            plgpu.SMEM((_SLOTS, _TILE, dim), jnp.bfloat16, transforms=SWIZZLED),
            plgpu.SMEM((ROWS, _TILE), jnp.bfloat16, transforms=SWIZZLED),
            plgpu.SMEM((ROWS, dim), jnp.float32),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=_SLOTS),
            plgpu.Barrier(num_barriers=_SLOTS),
        ],
        **({} if interpret is False else {"interpret": interpret}),
    )
    table = jnp.zeros((batch, 1), jnp.int32) if cache.table is None else cache.table
    return run(lengths.astype(jnp.int32), table, q, cache.keys, cache.values)


def verify_attention(nodes: Nodes, cache: Cache, lengths: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Arguments and result as in `api.verify_attention`; `interpret` is False or Mosaic GPU's interpret parameters."""
    batch, count, heads, dim = nodes.queries.shape
    kv_heads = nodes.keys.shape[2]
    group = heads // kv_heads
    rows = count * group
    q = nodes.queries.reshape(batch, count, kv_heads, group, dim).swapaxes(1, 2).reshape(batch, kv_heads, rows, dim)
    extra = round_up(rows, ROWS) - rows
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, extra), (0, 0)))
    mixed, top, total = past(padded, cache, lengths, interpret=interpret)
    mixed, top, total = mixed[..., :rows, :], top[..., :rows], total[..., :rows]

    # The fresh nodes, and everything together.
    fresh = nodes.keys.transpose(0, 2, 3, 1)
    scores = jnp.einsum("bkrd,bkdn->bkrn", q.astype(jnp.float32), fresh.astype(jnp.float32))
    seen = jnp.repeat(nodes.sees, group, axis=1)[:, None]
    scores = jnp.where(seen, scores, _MASKED)
    highest = jnp.maximum(scores.max(axis=3), top.max(axis=1))
    weights = jnp.exp(scores - highest[..., None])
    own = jnp.einsum("bkrn,bknd->bkrd", weights, nodes.values.swapaxes(1, 2).astype(jnp.float32))
    shrink = jnp.exp(top - highest[:, None])
    sums = weights.sum(axis=3) + jnp.sum(total * shrink, axis=1)
    out = (own + jnp.sum(mixed * shrink[..., None], axis=1)) / sums[..., None]
    out = out.reshape(batch, kv_heads, count, group, dim).swapaxes(1, 2)
    return out.reshape(batch, count, heads, dim).astype(nodes.queries.dtype)
