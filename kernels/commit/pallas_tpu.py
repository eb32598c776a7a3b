"""`commit` on TPU: a row's path touches one or two blocks of its cache, which are read, merged and written in place.

Nodes are gathered by a product with a one-hot matrix, which is exact: one product is the value itself, all others are zero.
Grid (rows, blocks): a step whose block is not touched keeps the index of the last touched one and does nothing, so that
rows without a commit (count 0) cost no traffic, and no block is in flight twice.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adrl_kernels.plan import Operand, Plan, cdiv, forward_filled, round_up
from adrl_kernels.verify_attention.arguments import Cache
from jax.experimental import pallas as pl

_BLOCK = 128
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


def block_tokens(cache: Cache) -> int:
    return min(_BLOCK, cache.keys.shape[3])


def touched(cache: Cache, length: int) -> int:
    """The most blocks that a path of `length` places touches."""
    size = block_tokens(cache)
    return min(cdiv(length - 1, size) + 1, cdiv(cache.capacity, size))


def plan(cache: Cache, nodes: int, length: int) -> Plan:
    """Grid and blocks for these shapes; the scalar arrays are those of `scalars`."""
    _, kv_heads, dim, _ = cache.keys.shape
    size, steps = block_tokens(cache), touched(cache, length)
    padded = round_up(nodes, 16)
    batch = cache.keys.shape[0] if cache.table is None else cache.table.shape[0]

    def block(b, i, major, minor, *_):
        return major[b * steps + i], 0, 0, minor[b * steps + i]

    def flipped(*args):
        m, _, _, n = block(*args)
        return m, 0, n, 0

    dtype = cache.keys.dtype
    keys = Operand("keys", cache.keys.shape, dtype, (None, kv_heads, dim, size), block)
    values = Operand("values", cache.values.shape, dtype, (None, kv_heads, size, dim), flipped)

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
    """int32 scalar arrays: major and minor block index of each step, whether it is a block of its own, its first token,
    and each row's start and end. NumPy arrays give NumPy arrays."""
    xp = np if isinstance(start, np.ndarray) else jnp
    size, steps = block_tokens(cache), touched(cache, length)
    batch = start.shape[0]
    first = xp.asarray(start, dtype=xp.int32)
    end = first + xp.asarray(count, dtype=xp.int32)
    block = first[:, None] // size + xp.arange(steps, dtype=xp.int32)
    live = (block * size < end[:, None]) & (count > 0)[:, None]
    block = xp.clip(block, 0, cdiv(cache.capacity, size) - 1)
    if cache.table is None:
        major, minor = xp.broadcast_to(xp.arange(batch, dtype=xp.int32)[:, None], block.shape), block
    else:
        per_page = cache.keys.shape[3] // size
        page = xp.take_along_axis(xp.asarray(cache.table), block // per_page, axis=1)
        major, minor = xp.where(live, page, 0), block % per_page
    column = lambda x: x.reshape(-1, 1)  # noqa: E731
    major, minor = forward_filled(column(live), column(major), column(minor))
    return (
        major.reshape(-1).astype(xp.int32),
        minor.reshape(-1).astype(xp.int32),
        live.reshape(-1).astype(xp.int32),
        (block * size).reshape(-1).astype(xp.int32),
        first,
        end,
    )


def _kernel(major, minor, live, base, first, end, path, fresh_k, fresh_v, keys, values, out_k, out_v):
    b, i = pl.program_id(0), pl.program_id(1)
    step = b * pl.num_programs(1) + i
    kv_heads, _, size = keys.shape
    length, nodes = path.shape[1], fresh_k.shape[2]
    before = jnp.maximum(step - 1, 0)
    new = (step == 0) | (major[step] != major[before]) | (minor[step] != minor[before])

    @pl.when(new)
    def _copy():
        # A block that nothing is written to (no row commits anything) goes back as it came.
        out_k[...] = keys[...]
        out_v[...] = values[...]

    @pl.when(live[step] != 0)
    def _write():
        exact = dict(precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        wide = jnp.float32
        # One-hot over (nodes, tokens of the block): token t takes node path[t - first].
        token = base[step] + jax.lax.broadcasted_iota(jnp.int32, (length, size), 1)
        place = jax.lax.broadcasted_iota(jnp.int32, (length, size), 0)
        at_place = (token - first[b] == place) & (token < end[b])
        node = jax.lax.broadcasted_iota(jnp.int32, (nodes, length), 0)
        at_node = node == path[0:1, :]
        onehot = jax.lax.dot_general(at_node.astype(wide), at_place.astype(wide), (((1,), (0,)), ((), ())), **exact)
        written = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) + base[step]
        written = (written >= first[b]) & (written < end[b])
        written_down = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) + base[step]
        written_down = (written_down >= first[b]) & (written_down < end[b])

        def head(h):
            k = jax.lax.dot_general(fresh_k[h].astype(wide), onehot, (((1,), (0,)), ((), ())), **exact)
            out_k[h] = jnp.where(written, k, out_k[h].astype(wide)).astype(out_k.dtype)
            v = jax.lax.dot_general(onehot, fresh_v[h].astype(wide), (((0,), (0,)), ((), ())), **exact)
            out_v[h] = jnp.where(written_down, v, out_v[h].astype(wide)).astype(out_v.dtype)

        jax.lax.fori_loop(0, kv_heads, lambda h, _: head(h), None)


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
    k, v = layout.call(functools.partial(_kernel), scalar_arrays, arrays, name="commit", interpret=interpret)
    return cache._replace(keys=k, values=v)
