"""What `verify_attention` means: one softmax over everything a node sees, in the widest float at hand."""

import jax
import jax.numpy as jnp
from adrl_kernels.verify_attention.arguments import Cache, Nodes


def rows_of(cache: Cache, wide) -> tuple[jax.Array, jax.Array]:
    """Keys `[B, K, D, S]` and values `[B, K, S, D]` in the dtype `wide`, gathered from pages and dequantised."""
    keys, values = cache.keys.astype(wide), cache.values.astype(wide)
    if cache.quantized:
        keys = keys * cache.key_scales[:, :, None].astype(wide)
        values = values * cache.value_scales[..., None].astype(wide)
    if cache.table is None:
        return keys, values
    table = jnp.clip(cache.table, 0, keys.shape[0] - 1)
    keys, values = keys[table], values[table]  # [B, M, K, D, T], [B, M, K, T, D]
    batch, pages, kv_heads, dim, size = keys.shape
    keys = jnp.moveaxis(keys, 1, 3).reshape(batch, kv_heads, dim, pages * size)
    return keys, jnp.moveaxis(values, 1, 2).reshape(batch, kv_heads, pages * size, dim)


def visible_slots(nodes: Nodes, lengths: jax.Array, capacity: int) -> jax.Array:
    """Which committed tokens each node sees, bool `[B, N, S]`."""
    slots = jnp.arange(capacity, dtype=jnp.int32)
    seen = jnp.broadcast_to(slots < lengths[:, None, None], (*nodes.queries.shape[:2], capacity))
    return seen if nodes.first is None else seen & (slots >= nodes.first[..., None])


def verify_attention(nodes: Nodes, cache: Cache, lengths: jax.Array) -> jax.Array:
    """Attention of the nodes, `[B, N, H, D]` in at least float32. Arguments as in `api.verify_attention`."""
    q = nodes.queries
    batch, count, heads, dim = q.shape
    kv_heads = nodes.keys.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    past_keys, past_values = rows_of(cache, wide)
    keys = jnp.concatenate([past_keys, nodes.keys.transpose(0, 2, 3, 1).astype(wide)], axis=3)
    values = jnp.concatenate([past_values, nodes.values.swapaxes(1, 2).astype(wide)], axis=2)
    seen = jnp.concatenate([visible_slots(nodes, lengths, cache.capacity), nodes.sees], axis=2)
    q = q.astype(wide).reshape(batch, count, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("bnkgd,bkds->bnkgs", q, keys, precision="highest")
    weights = jax.nn.softmax(jnp.where(seen[:, :, None, None], scores, -jnp.inf), axis=-1)
    # Values nobody sees may be anything, NaN too, and 0 x NaN is NaN.
    values = jnp.where(jnp.any(seen, axis=1)[:, None, :, None], values, 0)
    out = jnp.einsum("bnkgs,bksd->bnkgd", weights, values, precision="highest")
    return out.reshape(batch, count, heads, dim)
