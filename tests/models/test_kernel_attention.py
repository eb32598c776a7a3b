"""Attention and commits through the kernels (interpreted) against `kv_cache`: the same results, the same caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.models import kernel_attention, kv_cache
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import KVCache, TreeCache, init_cache

CONFIG = ModelConfig("llama", 61, 32, 48, 1, 4, 2, 8)
BATCH, CAPACITY = 3, 24


def inputs(count, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)  # noqa: E731
    cache = KVCache((draw(BATCH, 2, 8, CAPACITY),), (draw(BATCH, 2, CAPACITY, 8),))
    return cache, (draw(BATCH, count, 4, 8), draw(BATCH, count, 2, 8), draw(BATCH, count, 2, 8))


@pytest.mark.parametrize("window", (None, 4))
def test_a_chain(window):
    cache, qkv = inputs(3)
    positions = jnp.array([0, 9, CAPACITY - 3])[:, None] + jnp.arange(3)

    def run(attend, cache):
        return jax.jit(lambda cache, positions: attend(positions)(*qkv, layer=0, window=window, cache=cache))(cache, positions)

    ours, our_cache = run(lambda p: kernel_attention.chain_attention(p, "interpret"), cache)
    theirs, their_cache = run(kv_cache.cached_attention, cache)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
    for x, y in zip(jax.tree.leaves(our_cache), jax.tree.leaves(their_cache), strict=True):
        np.testing.assert_array_equal(x, y)


def test_rows_at_their_end_write_what_fits():
    cache, qkv = inputs(3)
    positions = jnp.array([0, 22, CAPACITY])[:, None] + jnp.arange(3)
    attend = jax.jit(lambda cache, p: kernel_attention.chain_attention(p, "interpret")(*qkv, layer=0, window=None, cache=cache))
    _, after = attend(cache, positions)
    changed = np.asarray(jnp.any(after.values[0] != cache.values[0], axis=(1, 3)))
    assert [np.flatnonzero(row).tolist() for row in changed] == [[0, 1, 2], [22, 23], []]


@pytest.mark.parametrize("window", (None, 4))
def test_a_tree_and_its_commit(window):
    cache, qkv = inputs(5)
    parents = np.array([0, 0, 0, 1, 3])
    sees = np.eye(5, dtype=bool)
    for i in range(1, 5):
        sees[i] |= sees[parents[i]]
    levels = jnp.asarray(sees.sum(1) - 1)
    sees = jnp.broadcast_to(jnp.asarray(sees), (BATCH, 5, 5))
    root = jnp.array([0, 9, 20])
    positions = root[:, None] + levels
    path = jnp.array([[0, 1, 3, 4], [0, 2, 0, 0], [0, 1, 3, 0]])
    count = jnp.array([4, 2, 3])

    @jax.jit
    def ours(past):
        attend = kernel_attention.tree_attention(positions, root, sees, "interpret")
        tree = TreeCache(past, kernel_attention.empty_nodes(CONFIG))
        out, tree = attend(*qkv, layer=0, window=window, cache=tree)
        return out, kernel_attention.commit_path(tree, path, root, count, "interpret")

    @jax.jit
    def theirs(past):
        attend = kv_cache.tree_attention(positions, root, sees, positions, jnp.int32(0))
        out, tree = attend(*qkv, layer=0, window=window, cache=TreeCache(past, init_cache(CONFIG, BATCH, 5)))
        return out, kv_cache.commit_path(tree, path, root)

    (out, after), (right, expected) = ours(cache), theirs(cache)
    np.testing.assert_allclose(out, right, atol=2e-6)
    for b in range(BATCH):
        until = int(root[b] + count[b])
        np.testing.assert_array_equal(after.keys[0][b, :, :, :until], expected.keys[0][b, :, :, :until])
        np.testing.assert_array_equal(after.values[0][b, :, :until], expected.values[0][b, :, :until])
        # What was not accepted is not written.
        np.testing.assert_array_equal(after.values[0][b, :, until:], cache.values[0][b, :, until:])


def test_what_the_kernels_cannot_serve():
    assert kernel_attention.problem("pallas_tpu", CONFIG, 8, 4, 1024) is None
    assert "71 nodes" in kernel_attention.problem("pallas_tpu", CONFIG, 71, 4, 1024)
    assert "float32; bfloat16 is supported" in kernel_attention.problem("pallas_gpu", CONFIG, 8, 4, 1024)
    gemma = ModelConfig("gemma3", 61, 32, 48, 2, 4, 2, 64, sliding_window=8, dtype="bfloat16")
    assert "sliding windows" in kernel_attention.problem("pallas_gpu", gemma, 8, 4, 1024)
