"""`commit` on TPU: what a row's path touches of its cache is read, merged and written in place, in the smallest blocks that lie
whole in memory: 128 tokens of keys, whose tokens are lanes, and 16 of values, whose tokens are sublanes.

Nodes are gathered by a product with a one-hot matrix, which is exact: one product is the value itself, all others are zero.
Grid (rows, blocks): a step whose block is not touched keeps the index of the last touched one and does nothing, so that
rows without a commit (count 0) cost no traffic, and no block is in flight twice.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adrl_kernels.plan import Operand, Plan, cdiv, forward_filled, round_up
from adrl_kernels.verify_attention.arguments import Cache
from jax.experimental import pallas as pl

_BLOCK = 128
_VALUE_BLOCK = 16  # two tiles of float32, one of bfloat16
MAX_PATH = 65
MAX_NODES = 64


def problem(cache: Cache, nodes: int, length: int) -> str | None:
    """What keeps the kernel from doing this call, None where nothing does."""
    if cache.keys.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the cache is {cache.keys.dtype}; float32 and bfloat16 are supported"
    if nodes > MAX_NODES:
        return f"{nodes} nodes; up to {MAX_NODES} are supported"
    if length > MAX_PATH:
        return f"paths of {length} places; up to {MAX_PATH} are supported"
    if cache.table is not None and cache.keys.shape[3] % _BLOCK:
        return f"pages of {cache.keys.shape[3]} tokens; multiples of {_BLOCK} are supported"
    return None


def block_tokens(cache: Cache) -> tuple[int, int]:
    """Tokens of a block of keys and of a block of values."""
    return min(_BLOCK, cache.keys.shape[3]), min(_VALUE_BLOCK, cache.keys.shape[3])


def touched(cache: Cache, length: int) -> int:
    """The most blocks (of values, there are no fewer than of keys) that a path of `length` places touches."""
    size = block_tokens(cache)[1]
    return min(cdiv(length - 1, size) + 1, cdiv(cache.capacity, size))


def plan(cache: Cache, nodes: int, length: int) -> Plan:
    """Grid and blocks for these shapes; the scalar arrays are those of `scalars`."""
    _, kv_heads, dim, _ = cache.keys.shape
    (key_size, value_size), steps = block_tokens(cache), touched(cache, length)
    padded = round_up(nodes, 16)
    batch = cache.keys.shape[0] if cache.table is None else cache.table.shape[0]
    dtype = cache.keys.dtype
    keys = Operand(
        "keys",
        cache.keys.shape,
        dtype,
        (None, kv_heads, dim, key_size),
        lambda b, i, *s: (s[0][b * steps + i], 0, 0, s[1][b * steps + i]),
        partial=True,
    )
    values = Operand(
        "values",
        cache.values.shape,
        dtype,
        (None, kv_heads, value_size, dim),
        lambda b, i, *s: (s[4][b * steps + i], 0, s[5][b * steps + i], 0),
        partial=True,
    )

    def fresh(*shape):
        return Operand("fresh", (batch, *shape), dtype, (None, *shape), lambda b, *_: (b, 0, 0, 0))

    return Plan(
        grid=(batch, steps),
        semantics=("arbitrary", "arbitrary"),
        inputs=(
            Operand("path", (batch, 1, length), jnp.int32, (None, 1, length), lambda b, *_: (b, 0, 0)),
            fresh(kv_heads, dim, padded),
            fresh(kv_heads, padded, dim),
            keys,
            values,
        ),
        outputs=(keys, values),
        aliases=((3, 0), (4, 1)),
    )


def scalars(cache: Cache, length: int, start, count) -> tuple[Any, ...]:
    """int32 scalar arrays: of keys, then of values, the major and minor block index of each step, whether it is a block of its
    own, and its first token; then each row's start and end. NumPy arrays give NumPy arrays."""
    xp = np if isinstance(start, np.ndarray) else jnp
    first = xp.asarray(start, dtype=xp.int32)
    end = first + xp.asarray(count, dtype=xp.int32)
    steps = touched(cache, length)
    return (*(x for size in block_tokens(cache) for x in _blocks(cache, size, steps, first, end)), first, end)


def _blocks(cache: Cache, size: int, steps: int, first, end) -> tuple[Any, ...]:
    xp = np if isinstance(first, np.ndarray) else jnp
    block = first[:, None] // size + xp.arange(steps, dtype=xp.int32)
    live = (block * size < end[:, None]) & (end > first)[:, None]
    block = xp.clip(block, 0, cdiv(cache.capacity, size) - 1)
    if cache.table is None:
        major, minor = xp.broadcast_to(xp.arange(first.shape[0], dtype=xp.int32)[:, None], block.shape), block
    else:
        per_page = cache.keys.shape[3] // size
        page = xp.take_along_axis(xp.asarray(cache.table), block // per_page, axis=1)
        major, minor = xp.where(live, page, 0), block % per_page
    column = lambda x: x.reshape(-1, 1)  # noqa: E731
    major, minor = forward_filled(column(live), column(major), column(minor))
    return tuple(x.reshape(-1).astype(xp.int32) for x in (major, minor, live, block * size))


def _kernel(*refs):
    first, end, path, fresh_k, fresh_v, keys, values, out_k, out_v = refs[8:]
    b = pl.program_id(0)
    step = b * pl.num_programs(1) + pl.program_id(1)
    before = jnp.maximum(step - 1, 0)
    kv_heads, length, wide = keys.shape[0], path.shape[1], jnp.float32

    def product(x, y, contract):
        dims = ((contract[:1], contract[1:]), ((), ()))
        return jax.lax.dot_general(
            x.astype(wide), y.astype(wide), dims, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide
        )

    def merge(blocks, fresh, old, out, lanes):
        major, minor, live, base = blocks
        size = old.shape[2 if lanes else 1]

        @pl.when((step == 0) | (major[step] != major[before]) | (minor[step] != minor[before]))
        def _copy():
            # A block that nothing is written to (no row commits anything) goes back as it came.
            out[...] = old[...]

        @pl.when(live[step] != 0)
        def _write():
            # One-hot over (nodes, tokens of the block): token t takes node path[t - first].
            iota = lambda shape, axis: jax.lax.broadcasted_iota(jnp.int32, shape, axis)  # noqa: E731
            shape = (length, size) if lanes else (size, length)
            token = base[step] + iota(shape, int(lanes))
            at_place = (token - first[b] == iota(shape, int(not lanes))) & (token < end[b])
            at_node = iota((fresh_v.shape[1], length), 0) == path[0:1, :]
            onehot = product(at_node, at_place, (1, 0)) if lanes else product(at_place, at_node, (1, 1))
            written = base[step] + iota((1, size) if lanes else (size, 1), int(lanes))
            written = (written >= first[b]) & (written < end[b])

            def head(h):
                moved = product(fresh[h], onehot, (1, 0)) if lanes else product(onehot, fresh[h], (1, 0))
                out[h] = jnp.where(written, moved, out[h].astype(wide)).astype(out.dtype)

            jax.lax.fori_loop(0, kv_heads, lambda h, _: head(h), None)

    merge(refs[:4], fresh_k, keys, out_k, True)
    merge(refs[4:8], fresh_v, values, out_v, False)


def commit(
    cache: Cache,
    keys: jax.Array,
    values: jax.Array,
    path: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    interpret: Any = False,
) -> Cache:
    """Arguments and result as in `api.commit`; `interpret` as in `verify_attention.pallas_tpu`."""
    nodes, length = keys.shape[1], path.shape[1]
    layout = plan(cache, nodes, length)
    extra = layout.inputs[1].shape[3] - nodes
    fresh_k = jnp.pad(keys.transpose(0, 2, 3, 1), ((0, 0), (0, 0), (0, 0), (0, extra))).astype(cache.keys.dtype)
    fresh_v = jnp.pad(values.swapaxes(1, 2), ((0, 0), (0, 0), (0, extra), (0, 0))).astype(cache.keys.dtype)
    arrays = [path[:, None].astype(jnp.int32), fresh_k, fresh_v, cache.keys, cache.values]
    scalar_arrays = scalars(cache, length, jnp.asarray(start), jnp.asarray(count))
    k, v = layout.call(_kernel, scalar_arrays, arrays, name="commit", interpret=interpret)
    return cache._replace(keys=k, values=v)
