"""Verify passes through the accelerator kernels: `kv_cache.cached_attention` and `tree_attention` by other means.

The cache's layout and the results are those of `kv_cache`; only who computes them differs. Fresh keys and values meet the
cache after attention, not before, so that attention reads what was committed and nothing else.

Shapes as in `kv_cache`.
"""

import jax
import jax.numpy as jnp
from adrl_kernels import choice
from adrl_kernels.commit import api as committing
from adrl_kernels.commit import pallas_tpu as commit_tpu
from adrl_kernels.verify_attention import api as attention
from adrl_kernels.verify_attention import pallas_tpu as attention_tpu
from adrl_kernels.verify_attention.arguments import Cache, Nodes

from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import KVCache, TreeCache

MAX_TOKENS = 64
"""Fresh tokens a row that every kernel takes; a longer chunk is a prefill, which stays with XLA."""


def problem(kernels: str, config: ModelConfig, nodes: int, batch: int, capacity: int) -> str | None:
    """What keeps these kernels from verifying `nodes` tokens a row of this model, None where nothing does."""
    c, dtype = config, config.compute_dtype
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    fresh = struct(batch, nodes, c.num_kv_heads, c.head_dim)
    cache = Cache(struct(batch, c.num_kv_heads, c.head_dim, capacity), struct(batch, c.num_kv_heads, capacity, c.head_dim))
    queries = struct(batch, nodes, c.num_heads, c.head_dim)
    sees = jax.ShapeDtypeStruct((batch, nodes, nodes), bool)
    arguments = Nodes(queries, fresh, fresh, sees)
    if kernels == "pallas_gpu":
        window = None if c.sliding_window is None else jax.ShapeDtypeStruct((batch, nodes), jnp.int32)
        return choice.gpu_module("verify_attention").problem(arguments._replace(first=window), cache)
    return attention_tpu.problem(arguments, cache) or commit_tpu.problem(cache, nodes, nodes)


def chain_attention(positions: jax.Array, implementation: str):
    """`kv_cache.cached_attention` for the few tokens of a decode step or a drafted chain. Rows whose write would pass the
    capacity (they serve nobody) write what fits.

    Args:
        positions: int32 `[B, T]`, consecutive within a row.
        implementation: see `adrl_kernels.choice`.
    """
    batch, count = positions.shape
    start = positions[:, 0]
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((count, count), bool)), (batch, count, count))
    path = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, count))

    def attend(q, k, v, *, layer, window, cache):
        past = Cache(cache.keys[layer], cache.values[layer])
        lengths = jnp.clip(start, 0, past.capacity)
        nodes = _nodes(q, k, v, causal, positions, positions, window)
        out = attention.verify_attention(nodes, past, lengths, implementation=implementation)
        fits = jnp.clip(past.capacity - lengths, 0, count)
        past = committing.commit(past, k, v, path, lengths, fits, implementation=implementation)
        return out, _with_layer(cache, layer, past.keys, past.values)

    return attend


def tree_attention(positions: jax.Array, root: jax.Array, sees: jax.Array, implementation: str):
    """`kv_cache.tree_attention` for all nodes of a tree at once: its fresh slots are the nodes themselves.

    Args:
        positions: int32 `[B, N]`, each node's position in its own path.
        root: int32 `[B]`, slots below it are committed.
        sees: bool `[B, N, N]`.
        implementation: see `adrl_kernels.choice`.
    """

    def attend(q, k, v, *, layer, window, cache):
        past = Cache(cache.past.keys[layer], cache.past.values[layer])
        nodes = _nodes(q, k, v, sees, positions, positions, window)
        lengths = jnp.clip(root, 0, past.capacity)
        out = attention.verify_attention(nodes, past, lengths, implementation=implementation)
        fresh = _with_layer(cache.fresh, layer, k, v)
        return out, TreeCache(cache.past, fresh)

    return attend


def empty_nodes(config: ModelConfig) -> KVCache:
    """What stands for the fresh half of a `TreeCache` before `tree_attention` fills it, layer by layer."""
    return KVCache((None,) * config.num_layers, (None,) * config.num_layers)


def commit_path(cache: TreeCache, path: jax.Array, start: jax.Array, count: jax.Array, implementation: str) -> KVCache:
    """`past` with the first `count` entries of a path, and nothing else, at slots `start …`.

    Args:
        cache: whose fresh keys and values are `[B, N, K, D]`, as `tree_attention` left them.
        path: int32 `[B, L]`, nodes, root first.
        start: int32 `[B]`.
        count: int32 `[B]`, 0 … L.
    """
    past, fresh = cache
    layers = [
        committing.commit(
            Cache(k, v),
            new_k,
            new_v,
            path,
            start,
            jnp.clip(jnp.minimum(count, past.capacity - start), 0, path.shape[1]),
            implementation=implementation,
        )
        for k, v, new_k, new_v in zip(past.keys, past.values, fresh.keys, fresh.values)
    ]
    return KVCache(tuple(x.keys for x in layers), tuple(x.values for x in layers))


def _nodes(q, k, v, sees, positions, fresh_positions, window) -> Nodes:
    if window is None:
        return Nodes(q, k, v, sees)
    sees = sees & (fresh_positions[:, None] > positions[..., None] - window)
    return Nodes(q, k, v, sees, jnp.maximum(positions - window + 1, 0))


def _with_layer(cache: KVCache, layer: int, keys, values) -> KVCache:
    return KVCache(
        cache.keys[:layer] + (keys,) + cache.keys[layer + 1 :],
        cache.values[:layer] + (values,) + cache.values[layer + 1 :],
    )
