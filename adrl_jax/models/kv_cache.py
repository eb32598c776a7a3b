"""A contiguous key-value cache whose rows are as long as `length` says, and attention over it.

Shapes: `B` rows, `S` capacity in tokens, `T` fresh tokens, `N` query heads, `K` key-value heads, `D` head size.

Nothing is ever removed from a row: rejected entries are overwritten by the next write, and keys at positions the query
may not see are masked. Writes past the capacity would be slid back silently by XLA; callers must refuse them on the host
(`check_capacity`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

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
        keys = jax.vmap(lambda b, f, s: jax.lax.dynamic_update_slice(b, f, (0, 0, s)))(
            cache.keys[layer], k.transpose(0, 2, 3, 1), start
        )
        values = jax.vmap(lambda b, f, s: jax.lax.dynamic_update_slice(b, f, (0, s, 0)))(
            cache.values[layer], v.swapaxes(1, 2), start
        )
        cache = KVCache(
            cache.keys[:layer] + (keys,) + cache.keys[layer + 1 :],
            cache.values[:layer] + (values,) + cache.values[layer + 1 :],
        )
        return masked_attention(q, keys, values, _visible(positions, keys.shape[3], window)), cache

    return attend


def _visible(positions: jax.Array, capacity: int, window: int | None) -> jax.Array:
    slots = jnp.arange(capacity, dtype=jnp.int32)
    seen = slots <= positions[..., None]
    if window is not None:
        seen &= slots > positions[..., None] - window
    return seen


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
    batch, length, heads, dim = q.shape
    kv_heads, capacity = values.shape[1:3]
    group = heads // kv_heads
    # One batch dimension and two-dimensional operands: with [B, K] as two batch dimensions, or with the query positions on
    # an axis of their own, XLA's CPU products take three times as long.
    q = q.reshape(batch, length, kv_heads, group, dim).swapaxes(1, 2).reshape(batch * kv_heads, length * group, dim)
    keys = keys.reshape(batch * kv_heads, dim, capacity)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jax.lax.dot_general(q, keys, (((2,), (1,)), ((0,), (0,))), preferred_element_type=wide)
    scores = scores.reshape(batch, kv_heads, length, group, capacity)
    scores = jnp.where(visible[:, None, :, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype).reshape(batch * kv_heads, length * group, capacity)
    values = values.reshape(batch * kv_heads, capacity, dim)
    out = jax.lax.dot_general(weights, values, (((2,), (1,)), ((0,), (0,))))
    return out.reshape(batch, kv_heads, length, group, dim).swapaxes(1, 2).reshape(batch, length, heads, dim)
