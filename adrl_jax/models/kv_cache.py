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
    """Keys and values, one array a layer: `[B, K, S, D]` in the compute dtype."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]


def init_cache(config: ModelConfig, batch: int, capacity: int, num_layers: int | None = None) -> KVCache:
    """An all-zero cache for `batch` rows of `capacity` tokens."""
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    layers = config.num_layers if num_layers is None else num_layers

    def zeros():
        return tuple(jnp.zeros(shape, config.compute_dtype) for _ in range(layers))

    return KVCache(zeros(), zeros())


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

    def write(buffer, fresh):
        return jax.vmap(lambda b, f, s: jax.lax.dynamic_update_slice(b, f, (0, s, 0)))(buffer, fresh, start)

    def attend(q, k, v, *, layer, window, cache):
        keys = write(cache.keys[layer], k.swapaxes(1, 2))
        values = write(cache.values[layer], v.swapaxes(1, 2))
        cache = KVCache(
            cache.keys[:layer] + (keys,) + cache.keys[layer + 1 :],
            cache.values[:layer] + (values,) + cache.values[layer + 1 :],
        )
        return masked_attention(q, keys, values, _visible(positions, keys.shape[2], window)), cache

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
        keys, values: `[B, K, S, D]`.
        visible: bool `[B, T, S]`; a query that sees nothing returns the mean of all values, never NaN.

    Returns:
        `[B, T, N, D]` in the dtype of `values`.
    """
    batch, length, heads, dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    group = heads // kv_heads
    # One batch dimension and two-dimensional operands: with [B, K] as two batch dimensions, or with the query positions on
    # an axis of their own, XLA's CPU products take three times as long.
    q = q.reshape(batch, length, kv_heads, group, dim).swapaxes(1, 2).reshape(batch * kv_heads, length * group, dim)
    keys = keys.reshape(batch * kv_heads, capacity, dim)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jax.lax.dot_general(q, keys, (((2,), (2,)), ((0,), (0,))), preferred_element_type=wide)
    scores = scores.reshape(batch, kv_heads, length, group, capacity)
    scores = jnp.where(visible[:, None, :, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype).reshape(batch * kv_heads, length * group, capacity)
    values = values.reshape(batch * kv_heads, capacity, dim)
    out = jax.lax.dot_general(weights, values, (((2,), (1,)), ((0,), (0,))))
    return out.reshape(batch, kv_heads, length, group, dim).swapaxes(1, 2).reshape(batch, length, heads, dim)
