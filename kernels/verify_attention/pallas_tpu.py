"""`verify_attention` on TPU: the cache is read once, page by page, for all heads and nodes of a row together.

The grid is (rows, steps). Each step brings `width` blocks of at most 128 tokens of all key-value heads, every block by an
operand of its own, so that a row's end costs at most the rest of one block and no step is too short to hide its overhead.
Dead blocks keep the index of the last live one: they are not fetched, and steps without a live block do nothing.
The fresh nodes come first and start the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867); they always see
themselves, so its maximum is finite from the start. Queries of a group lie in the rows of one product, `[G N, D]`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adrl_kernels.plan import Operand, Plan, cdiv, forward_filled, round_up
from adrl_kernels.verify_attention.arguments import Cache, Nodes
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK = 128
"""Tokens of a block, where the cache has that many."""

MAX_NODES = 64
MAX_HEAD = 256
MAX_BLOCKS = 1 << 15
"""Blocks of all rows together: two numbers a block lie in scalar memory."""

_LANES = 128
_STEP_BYTES = 1 << 20
_MASKED = -1e30


def problem(nodes: Nodes, cache: Cache) -> str | None:
    """What keeps the kernel from doing this call, None where nothing does."""
    _, count, _, dim = nodes.queries.shape
    if nodes.queries.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries are {nodes.queries.dtype}; float32 and bfloat16 are supported"
    if not 1 <= count <= MAX_NODES:
        return f"{count} nodes a row; 1 to {MAX_NODES} are supported"
    if dim % 8 or not 8 <= dim <= MAX_HEAD:
        return f"head size {dim}; multiples of 8 up to {MAX_HEAD} are supported"
    blocks = nodes.queries.shape[0] * cdiv(cache.capacity, block_tokens(cache))
    if blocks > MAX_BLOCKS:
        return f"{nodes.queries.shape[0]} rows of {cache.capacity} tokens; up to {MAX_BLOCKS} blocks of {BLOCK} are supported"
    if cache.table is not None:
        page = cache.keys.shape[3]
        if page % BLOCK:  # smaller ones would be padded to this in memory
            return f"pages of {page} tokens; multiples of {BLOCK} are supported"
    return None


def block_tokens(cache: Cache) -> int:
    """Tokens of a block: a page, a whole short row, or `BLOCK`."""
    return min(BLOCK, cache.keys.shape[3])


def step_blocks(cache: Cache) -> int:
    """Blocks that a grid step brings: about a megabyte, but no more than half a row."""
    _, kv_heads, dim, _ = cache.keys.shape
    size = block_tokens(cache)
    one = 2 * kv_heads * dim * size * jnp.dtype(cache.keys.dtype).itemsize
    return int(np.clip(_STEP_BYTES // one, 1, min(8, max(1, cdiv(cache.capacity, size) // 2))))


def plan(nodes: Nodes, cache: Cache) -> Plan:
    """Grid and blocks for these shapes; the scalar arrays are those of `scalars`."""
    batch, count, heads, dim = nodes.queries.shape
    kv_heads = nodes.keys.shape[2]
    rows = round_up(count * (heads // kv_heads), 16)
    nodes_padded = round_up(count, 16)
    size, width = block_tokens(cache), step_blocks(cache)
    steps = cdiv(cdiv(cache.capacity, size), width)
    dtype = nodes.queries.dtype

    def row(name, *shape, dtype=dtype):
        rest = (0,) * len(shape)
        return Operand(name, (batch, *shape), dtype, (None, *shape), lambda b, j, *_: (b, *rest))

    def blocks(name, array, block, axis):
        def operand(i):
            def index(b, j, major, minor, lengths, low):
                place = (b * steps + j) * width + i
                out = [major[place]] + [0] * (len(block) - 1)
                out[axis] = minor[place]
                return tuple(out)

            return Operand(name, array.shape, array.dtype, block, index, partial=True)

        return tuple(operand(i) for i in range(width))

    inputs = (
        row("queries", kv_heads, rows, dim),
        row("fresh", kv_heads, nodes_padded, dim),
        row("fresh", kv_heads, nodes_padded, dim),
        row("sees", rows, 4, dtype=jnp.int32),
        *blocks("keys", cache.keys, (None, kv_heads, dim, size), 3),
        *blocks("values", cache.values, (None, kv_heads, size, dim), 2),
    )
    if cache.quantized:
        inputs += blocks("scales", cache.key_scales, (None, kv_heads, size), 2)
        inputs += blocks("scales", cache.value_scales, (None, kv_heads, size), 2)
    return Plan(
        grid=(batch, steps),
        semantics=("parallel", "arbitrary"),
        inputs=inputs,
        outputs=(row("out", kv_heads, rows, dim),),
        scratch=(
            pltpu.VMEM((kv_heads, rows, _LANES), jnp.float32),
            pltpu.VMEM((kv_heads, rows, _LANES), jnp.float32),
            pltpu.VMEM((kv_heads, rows, dim), jnp.float32),
        ),
        vmem_limit=48 << 20,
    )


def scalars(nodes: Nodes, cache: Cache, lengths) -> tuple[Any, ...]:
    """int32 scalar arrays: block indices (major and minor) of each step's blocks, lengths, and the first token any node sees.

    NumPy arrays give NumPy arrays.
    """
    xp = np if isinstance(lengths, np.ndarray) else jnp
    batch = nodes.queries.shape[0]
    size, width = block_tokens(cache), step_blocks(cache)
    steps = cdiv(cdiv(cache.capacity, size), width)
    lengths = xp.asarray(lengths).astype(xp.int32)
    low = xp.zeros(batch, xp.int32) if nodes.first is None else xp.clip(xp.min(xp.asarray(nodes.first), axis=1), 0, None)
    block = xp.arange(steps * width, dtype=xp.int32)[None]
    live = (block * size < lengths[:, None]) & ((block + 1) * size > low[:, None])
    if cache.table is None:
        major = xp.broadcast_to(xp.arange(batch, dtype=xp.int32)[:, None], live.shape)
        minor = xp.broadcast_to(xp.minimum(block, cdiv(cache.capacity, size) - 1), live.shape)
    else:
        table = xp.asarray(cache.table)
        per_page = cache.keys.shape[3] // size
        page = xp.minimum(block[0] // per_page, table.shape[1] - 1)
        major = xp.where(live, table[:, page], 0)
        minor = xp.broadcast_to(block % per_page, live.shape)
    flat = lambda x: x.reshape(batch * steps, width)  # noqa: E731
    major, minor = forward_filled(flat(live), flat(major), flat(minor))
    major, minor = (xp.clip(x, 0, None).reshape(-1).astype(xp.int32) for x in (major, minor))
    return major, minor, lengths, low.astype(xp.int32)


def _kernel(major, minor, lengths, low, *refs, size, width, windowed, quantized, precision, widen):
    q, fresh_k, fresh_v, sees = refs[:4]
    keys, values = refs[4 : 4 + width], refs[4 + width : 4 + 2 * width]
    key_scales, value_scales = refs[4 + 2 * width : 4 + 3 * width], refs[4 + 3 * width : 4 + 4 * width]
    out, top, total, mixed = refs[-4:]
    b, j = pl.program_id(0), pl.program_id(1)
    kv_heads, rows, _ = q.shape
    dtype = q.dtype

    def product(x, y, contract):
        if widen:  # CPUs have no bfloat16 products with float32 sums; the products are the same
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        dims = ((contract[:1], contract[1:]), ((), ()))
        return jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)

    # A loop over heads, not a batched product: the program stays small, and its compilation short.
    def each_head(body):
        jax.lax.fori_loop(0, kv_heads, lambda h, _: body(h), None)

    def keep(h, highest, sums, sum_of_values):
        top[h] = jnp.broadcast_to(highest, (rows, _LANES))
        total[h] = jnp.broadcast_to(sums, (rows, _LANES))
        mixed[h] = sum_of_values

    @pl.when(j == 0)
    def _fresh():
        shape = (rows, fresh_k.shape[1])
        place = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        word = jnp.where(place < 32, sees[:, 0:1], sees[:, 1:2])
        seen = (jax.lax.shift_right_logical(word, place & 31) & 1) != 0

        def head(h):
            scores = jnp.where(seen, product(q[h], fresh_k[h], (1, 1)), _MASKED)
            highest = jnp.max(scores, axis=1, keepdims=True)
            weights = jnp.exp(scores - highest)
            keep(h, highest, jnp.sum(weights, axis=1, keepdims=True), product(weights.astype(dtype), fresh_v[h], (1, 0)))

        each_head(head)

    start = j * width * size
    end, first = lengths[b], low[b]

    @pl.when((start < end) & (start + width * size > first))
    def _cache():
        # What lies past the end may be NaN, and 0 x NaN is NaN: values are cleared, not only weights.
        places = [start + i * size + jax.lax.broadcasted_iota(jnp.int32, (rows, size), 1) for i in range(width)]
        seen = [p < end for p in places]
        if windowed:
            seen = [s & (p >= sees[:, 2:3]) for s, p in zip(seen, places)]
        valid = [start + i * size + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) < end for i in range(width)]

        def head(h):
            scores = []
            for i in range(width):
                s = product(q[h], keys[i][h].astype(dtype), (1, 0))
                if quantized:
                    s = s * key_scales[i][pl.ds(h, 1), :]
                scores.append(jnp.where(seen[i], s, _MASKED))
            before = top[h][:, 0:1]
            highest = functools.reduce(jnp.maximum, [jnp.max(s, axis=1, keepdims=True) for s in scores], before)
            shrink = jnp.exp(before - highest)
            sums, sum_of_values = shrink * total[h][:, 0:1], shrink * mixed[h]
            for i in range(width):
                weights = jnp.exp(scores[i] - highest)
                sums += jnp.sum(weights, axis=1, keepdims=True)
                if quantized:
                    weights = jnp.where(seen[i], weights * value_scales[i][pl.ds(h, 1), :], 0.0)
                entries = values[i][h].astype(jnp.float32)
                entries = jnp.where(valid[i], entries, 0.0).astype(dtype)
                sum_of_values += product(weights.astype(dtype), entries, (1, 0))
            keep(h, highest, sums, sum_of_values)

        each_head(head)

    @pl.when(j == pl.num_programs(1) - 1)
    def _finish():
        def head(h):
            out[h] = (mixed[h] / total[h][:, 0:1]).astype(out.dtype)

        each_head(head)


def node_words(nodes: Nodes, rows: int) -> jax.Array:
    """int32 `[B, rows, 4]`: what each query row sees among the fresh nodes, 32 to a word, then its first committed token."""
    _, count, heads, _ = nodes.queries.shape
    bit = jnp.uint32(1) << (jnp.arange(count, dtype=jnp.uint32) % 32)
    bits = nodes.sees.astype(jnp.uint32) * bit
    low, high = jnp.sum(bits[..., :32], axis=2), jnp.sum(bits[..., 32:], axis=2)
    first = jnp.zeros_like(low) if nodes.first is None else nodes.first.astype(jnp.uint32)
    words = jnp.stack([low, high, first, jnp.zeros_like(low)], axis=2)
    words = jax.lax.bitcast_convert_type(words, jnp.int32)
    group = heads // nodes.keys.shape[2]
    words = jnp.repeat(words, group, axis=1)
    # Rows that only fill up see node 0, so that their softmax has something to divide by.
    return jnp.pad(words, ((0, 0), (0, rows - count * group), (0, 0)), constant_values=1)


def verify_attention(nodes: Nodes, cache: Cache, lengths: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Arguments and result as in `api.verify_attention`.

    Args:
        interpret: False, True (plain XLA operations) or `pltpu.InterpretParams` (a TPU's memories and copies).
    """
    batch, count, heads, dim = nodes.queries.shape
    kv_heads = nodes.keys.shape[2]
    group = heads // kv_heads
    layout = plan(nodes, cache)
    rows, padded = layout.inputs[0].shape[2], layout.inputs[1].shape[2]
    q = nodes.queries.reshape(batch, count, kv_heads, group, dim).swapaxes(1, 2).reshape(batch, kv_heads, count * group, dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - count * group), (0, 0)))
    fresh = [jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, padded - count), (0, 0))) for x in (nodes.keys, nodes.values)]
    width = step_blocks(cache)
    arrays = [q, *fresh, node_words(nodes, rows), *[cache.keys] * width, *[cache.values] * width]
    if cache.quantized:
        arrays += [*[cache.key_scales] * width, *[cache.value_scales] * width]
    kernel = functools.partial(
        _kernel,
        size=block_tokens(cache),
        width=width,
        windowed=nodes.first is not None,
        quantized=cache.quantized,
        precision=jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
        widen=interpret is not False,
    )
    scalar_arrays = scalars(nodes, cache, jnp.asarray(lengths))
    (out,) = layout.call(kernel, scalar_arrays, arrays, name="verify_attention", interpret=interpret)
    out = out[:, :, : count * group].reshape(batch, kv_heads, count, group, dim)
    return out.swapaxes(1, 2).reshape(batch, count, heads, dim)
