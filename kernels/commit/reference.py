"""What `commit` means, and its XLA form. Shapes as in `verify_attention.arguments`; `L` places of a path."""

import jax
import jax.numpy as jnp
from adrl_kernels.verify_attention.arguments import Cache


def commit(cache: Cache, keys: jax.Array, values: jax.Array, path: jax.Array, start: jax.Array, count: jax.Array) -> Cache:
    """Arguments and result as in `api.commit`."""
    size = cache.keys.shape[3]
    places = start[:, None] + jnp.arange(path.shape[1], dtype=jnp.int32)
    live = jnp.arange(path.shape[1]) < count[:, None]
    at = jnp.where(live, path, 0)
    taken = [jnp.take_along_axis(x, at[..., None, None], axis=1) for x in (keys, values)]  # [B, L, K, D]
    rows = jnp.broadcast_to(jnp.arange(places.shape[0])[:, None], places.shape)
    if cache.table is not None:
        page = jnp.clip(places // size, 0, cache.table.shape[1] - 1)
        rows, places = jnp.take_along_axis(cache.table, page, axis=1), places % size
    places = jnp.where(live, places, size)  # outside on purpose: such writes are dropped
    k, v = (x.astype(cache.keys.dtype) for x in taken)
    return cache._replace(
        keys=cache.keys.at[rows, :, :, places].set(k, mode="drop"),
        values=cache.values.at[rows, :, places, :].set(v, mode="drop"),
    )
