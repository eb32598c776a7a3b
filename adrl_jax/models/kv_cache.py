"""A contiguous key-value cache whose rows are as long as `length` says, and attention over it.

Shapes: `B` rows, `S` capacity in tokens, `T` fresh tokens, `N` query heads, `K` key-value heads, `D` head size.

Nothing is ever removed from a row: rejected entries are overwritten by the next write, and keys at positions the query
may not see are masked. Writes past the capacity would be slid back silently by XLA; callers must refuse them on the host
(`check_capacity`).

The nodes of a draft tree are not written to the cache: several share a position. They lie beside it in a small `TreeCache`,
and `commit_path` writes those of the path that stands.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.models.families import ModelConfig


class KVCache(NamedTuple):
    """Keys `[B, K, D, S]` and values `[B, K, S, D]`, one array a layer, in the compute dtype.

    Each lies as its product reads it. Scores from keys `[S, D]` take three times as long in a decode step on CPU, where the
    product copies a right operand that it must transpose.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @property
    def capacity(self) -> int:
        return self.values[0].shape[2]


def init_cache(config: ModelConfig, batch: int, capacity: int, num_layers: int | None = None) -> KVCache:
    """An all-zero cache for `batch` rows of `capacity` tokens."""
    layers = config.num_layers if num_layers is None else num_layers

    def zeros(*shape):
        return tuple(jnp.zeros((batch, config.num_kv_heads, *shape), config.compute_dtype) for _ in range(layers))

    return KVCache(zeros(config.head_dim, capacity), zeros(capacity, config.head_dim))


def with_capacity(cache: KVCache, capacity: int) -> KVCache:
    """`cache` with room for `capacity` tokens a row: padded with zeros, or cut where that is less than it has."""

    return KVCache(tuple(fit(k, 3, capacity) for k in cache.keys), tuple(fit(v, 2, capacity) for v in cache.values))


def fit(x: jax.Array, axis: int, size: int) -> jax.Array:
    """`x` with `size` entries along `axis`: padded with zeros at the end, or cut."""
    extra = size - x.shape[axis]
    if extra < 0:
        return jax.lax.slice_in_dim(x, 0, size, axis=axis)
    return jnp.pad(x, [(0, extra if a == axis else 0) for a in range(x.ndim)])


def check_capacity(capacity: int, needed: int) -> None:
    """Raises ValueError when a launch could write at or past `capacity`."""
    if needed > capacity:
        raise ValueError(f"the launch may write {needed} cache entries a row but the capacity is {capacity}")


def cached_attention(positions: jax.Array):
    """An `attend` for `Transformer` that writes fresh keys and values at `positions` and attends to all earlier ones.

    Args:
        positions: int32 `[B, T]`, consecutive within a row: row b writes slots `positions[b, 0] …`. A query at position p
            sees slots 0 … p (and no more than `window` of them in sliding layers).
    """
    start = positions[:, 0]

    def attend(q, k, v, *, layer, window, cache):
        keys = write_rows(cache.keys[layer], k.transpose(0, 2, 3, 1), start, 3)
        values = write_rows(cache.values[layer], v.swapaxes(1, 2), start, 2)
        cache = _with_layer(cache, layer, keys, values)
        return masked_attention(q, keys, values, _visible(positions, keys.shape[3], window)), cache

    return attend


def _visible(positions: jax.Array, capacity: int, window: int | None) -> jax.Array:
    slots = jnp.arange(capacity, dtype=jnp.int32)
    seen = slots <= positions[..., None]
    if window is not None:
        seen &= slots > positions[..., None] - window
    return seen


class TreeCache(NamedTuple):
    """A cache that is only read, and the keys and values of up to `F` nodes of a tree.

    Attributes:
        past: capacity S.
        fresh: capacity F, one slot a node.
    """

    past: KVCache
    fresh: KVCache


def tree_attention(positions: jax.Array, root: jax.Array, sees: jax.Array, fresh_positions: jax.Array, start: jax.Array):
    """An `attend` for nodes of a tree: each sees what was committed, and its own ancestors.

    Its cache is a `TreeCache`. Keys and values of the T nodes are written to the fresh slots `start …`.

    Args:
        positions: int32 `[B, T]`, each node's position in its own path.
        root: int32 `[B]`, slots of `past` below it are committed.
        sees: bool `[B, T, F]`, the node itself and its ancestors among the fresh slots.
        fresh_positions: int32 `[B, F]`, for sliding layers.
        start: int32 `[]`, the same in all rows, `start + T <= F`.
    """
    last_committed = jnp.broadcast_to(root[:, None] - 1, positions.shape)

    def attend(q, k, v, *, layer, window, cache):
        past, fresh = cache
        keys = jax.lax.dynamic_update_slice(fresh.keys[layer], k.transpose(0, 2, 3, 1), (0, 0, 0, start))
        values = jax.lax.dynamic_update_slice(fresh.values[layer], v.swapaxes(1, 2), (0, 0, start, 0))
        committed = _visible(last_committed, past.capacity, None)
        drafted = sees
        if window is not None:
            committed &= jnp.arange(past.capacity, dtype=jnp.int32) > positions[..., None] - window
            drafted &= fresh_positions[:, None] > positions[..., None] - window
        out = _attention(q, ((past.keys[layer], past.values[layer], committed), (keys, values, drafted)))
        return out, TreeCache(past, _with_layer(fresh, layer, keys, values))

    return attend


def commit_path(cache: TreeCache, path: jax.Array, start: jax.Array) -> KVCache:
    """`past` with the entries of a path at slots `start …`.

    Args:
        path: int32 `[B, P]`, fresh slots, root first.
        start: int32 `[B]`; `start + P` must not pass the capacity in rows that matter.
    """

    def commit(past, fresh, axis):
        at = path.reshape(path.shape[0], *[-1 if a == axis else 1 for a in range(1, 4)])
        return write_rows(past, jnp.take_along_axis(fresh, at, axis=axis), start, axis)

    past, fresh = cache
    return KVCache(
        tuple(commit(p, f, 3) for p, f in zip(past.keys, fresh.keys)),
        tuple(commit(p, f, 2) for p, f in zip(past.values, fresh.values)),
    )


def write_rows(buffer: jax.Array, fresh: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    """Row b of `fresh` written to row b of `buffer` from index `start[b]` of `axis` (of both) on."""

    def write(b, f, s):
        return jax.lax.dynamic_update_slice(b, f.astype(b.dtype), [s if a == axis - 1 else 0 for a in range(b.ndim)])

    return jax.vmap(write)(buffer, fresh, start)


def _with_layer(cache: KVCache, layer: int, keys: jax.Array, values: jax.Array) -> KVCache:
    return KVCache(
        cache.keys[:layer] + (keys,) + cache.keys[layer + 1 :],
        cache.values[:layer] + (values,) + cache.values[layer + 1 :],
    )


def masked_attention(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> jax.Array:
    """Softmax attention with scores of at least float32.

    Args:
        q: `[B, T, N, D]`, scaled.
        keys: `[B, K, D, S]`.
        values: `[B, K, S, D]`.
        visible: bool `[B, T, S]`; a query that sees nothing returns the mean of all values, never NaN.

    Returns:
        `[B, T, N, D]` in the dtype of `values`.
    """
    return _attention(q, ((keys, values, visible),))


def _attention(q: jax.Array, parts: tuple[tuple[jax.Array, jax.Array, jax.Array], ...]) -> jax.Array:
    """`masked_attention` with one softmax over the tokens of several (keys, values, visible), which are never joined."""
    batch, length, heads, dim = q.shape
    kv_heads = parts[0][1].shape[1]
    group = heads // kv_heads
    # One batch dimension and two-dimensional operands: with [B, K] as two batch dimensions, or with the query positions on
    # an axis of their own, XLA's CPU products take three times as long.
    q = q.reshape(batch, length, kv_heads, group, dim).swapaxes(1, 2).reshape(batch * kv_heads, length * group, dim)
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def scores(keys, visible):
        keys = keys.reshape(batch * kv_heads, dim, -1)
        out = jax.lax.dot_general(q, keys, (((2,), (1,)), ((0,), (0,))), preferred_element_type=wide)
        out = out.reshape(batch, kv_heads, length, group, -1)
        return jnp.where(visible[:, None, :, None], out, jnp.finfo(wide).min)

    every = [scores(keys, visible) for keys, _, visible in parts]
    weights = jax.nn.softmax(every[0] if len(parts) == 1 else jnp.concatenate(every, axis=-1), axis=-1)
    ends = np.cumsum([x.shape[-1] for x in every])[:-1]
    outs = []
    for part, (_, values, _) in zip(jnp.split(weights, ends, axis=-1), parts):
        part = part.astype(values.dtype).reshape(batch * kv_heads, length * group, -1)
        values = values.reshape(batch * kv_heads, -1, dim)
        outs.append(jax.lax.dot_general(part, values, (((2,), (1,)), ((0,), (0,)))))
    out = functools.reduce(jnp.add, outs)
    return out.reshape(batch, kv_heads, length, group, dim).swapaxes(1, 2).reshape(batch, length, heads, dim)
