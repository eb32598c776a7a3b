"""`verify_attention` as XLA operations: products in the given dtype, scores and softmax in float32."""

import jax
import jax.numpy as jnp
from adrl_kernels.verify_attention.arguments import Cache, Nodes
from adrl_kernels.verify_attention.reference import rows_of, visible_slots


def verify_attention(nodes: Nodes, cache: Cache, lengths: jax.Array) -> jax.Array:
    """Arguments and result as in `api.verify_attention`."""
    q = nodes.queries
    batch, count, heads, dim = q.shape
    kv_heads = nodes.keys.shape[2]
    keys, values = rows_of(cache, q.dtype)
    # One batch dimension: CPUs have no bfloat16 products over two.
    flat = batch * kv_heads
    rows = q.reshape(batch, count, kv_heads, heads // kv_heads, dim).swapaxes(1, 2).reshape(flat, -1, dim)
    precision = "highest" if q.dtype == jnp.float32 else None

    def product(x, y):
        y = y.reshape(flat, *y.shape[2:])
        return jax.lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))), precision=precision, preferred_element_type=jnp.float32)

    def scores(keys, seen):
        out = product(rows, keys).reshape(batch, kv_heads, count, heads // kv_heads, -1)
        return jnp.where(seen[:, None, :, None], out, -jnp.inf)

    seen = visible_slots(nodes, lengths, cache.capacity)
    values = jnp.where(jnp.any(seen, axis=1)[:, None, :, None], values, 0)
    every = jnp.concatenate([scores(keys, seen), scores(nodes.keys.transpose(0, 2, 3, 1), nodes.sees)], axis=-1)
    weights = jax.nn.softmax(every, axis=-1).astype(q.dtype).reshape(flat, rows.shape[1], -1)
    past, fresh = weights[..., : cache.capacity], weights[..., cache.capacity :]
    out = product(past, values) + product(fresh, nodes.values.swapaxes(1, 2))
    out = out.reshape(batch, kv_heads, count, heads // kv_heads, dim)
    return out.swapaxes(1, 2).reshape(batch, count, heads, dim).astype(q.dtype)
