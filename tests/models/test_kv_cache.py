"""Attention of draft trees beside the cache: every node as if its path were alone, and the path that stands committed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.models import transformer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import (
    KVCache,
    TreeCache,
    cached_attention,
    commit_path,
    init_cache,
    masked_attention,
    tree_attention,
    write_rows,
)

SIZES = dict(vocab_size=40, hidden_size=24, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
LLAMA = ModelConfig("llama", **SIZES)
SLIDING = dataclasses.replace(LLAMA, qk_norm=True, sliding_window=4, sliding_pattern=2)
CONFIGS = {"llama": LLAMA, "sliding": SLIDING}
ROWS, CAPACITY, LENGTHS = 3, 24, np.array([9, 2, 14])
# Two trees of eight nodes and depth four, and a chain.
PARENTS = np.array([[0, 0, 0, 1, 1, 3, 4, 5], [0, 0, 1, 1, 2, 4, 4, 5], [0, 0, 1, 2, 3, 0, 0, 0]])
NODES, DEPTH = PARENTS.shape[1], 4


@functools.cache
def params_of(config):
    """Peaked attention, so that differences show."""
    shapes = jax.eval_shape(lambda key: transformer.init_params(config, key), jax.random.key(0))
    rng = np.random.default_rng(2)
    return jax.tree.map(
        lambda x: (rng.normal(size=x.shape) * 0.2 if len(x.shape) > 1 else np.ones(x.shape)).astype("f"), shapes
    )


def levels_of(parents):
    levels = np.zeros_like(parents)
    for node in range(1, NODES):
        levels[:, node] = levels[np.arange(ROWS), parents[:, node]] + 1
    return levels


LEVELS = levels_of(PARENTS)
TEXT = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (ROWS, CAPACITY))
DRAFTS = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (ROWS, NODES))
DRAFTS[:, 0] = TEXT[np.arange(ROWS), LENGTHS - 1]


def path_to(row, node):
    path = [node]
    while path[-1]:
        path.append(int(PARENTS[row, path[-1]]))
    return path[::-1]


def sees():
    out = np.zeros((ROWS, NODES, NODES), bool)
    for row in range(ROWS):
        for node in range(NODES):
            out[row, node, path_to(row, node)] = True
    return jnp.asarray(out)


@functools.partial(jax.jit, static_argnums=0)
def plain(config, tokens):
    """Hidden states and cache of whole rows."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend, cache = cached_attention(positions), init_cache(config, *tokens.shape)
    return transformer.Transformer(config).apply({"params": params_of(config)}, tokens, positions, attend=attend, cache=cache)


@functools.partial(jax.jit, static_argnums=(0, 3))
def tree_pass(config, cache, sees, parts=((0, NODES),)):
    """Hidden states and caches of all nodes, fed in one or several parts."""
    root, found = jnp.asarray(LENGTHS - 1), []
    positions = root[:, None] + LEVELS
    cache = TreeCache(cache, jax.tree.map(lambda x: x + 1e4, init_cache(config, ROWS, NODES)))
    for start, end in parts:
        attend = tree_attention(positions[:, start:end], root, sees[:, start:end], positions, jnp.int32(start))
        nodes = jnp.asarray(DRAFTS)[:, start:end], positions[:, start:end]
        part, cache = transformer.Transformer(config).apply({"params": params_of(config)}, *nodes, attend=attend, cache=cache)
        found.append(part)
    return jnp.concatenate(found, axis=1), cache


def poisoned(cache):
    """Everything at or past the root's slot is garbage that must not be read."""
    committed = np.arange(CAPACITY) < (LENGTHS - 1)[:, None]
    return KVCache(
        tuple(jnp.where(committed[:, None, None], k, 1e4) for k in cache.keys),
        tuple(jnp.where(committed[:, None, :, None], v, 1e4) for v in cache.values),
    )


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def passed(request):
    """Config, cache before, and what the pass over all nodes gives."""
    config = CONFIGS[request.param]
    before = poisoned(plain(config, jnp.asarray(TEXT))[1])
    return config, before, *tree_pass(config, before, sees())


def alone(config, row, node):
    """Hidden state of a node whose path is the row's text, and that row's cache."""
    path = path_to(row, node)
    text = TEXT.copy()
    text[row, LENGTHS[row] - 1 : LENGTHS[row] - 1 + len(path)] = DRAFTS[row, path]
    hidden, cache = plain(config, jnp.asarray(text))
    return np.asarray(hidden[row, LENGTHS[row] - 2 + len(path)]), jax.tree.map(lambda x: np.asarray(x[row]), cache)


def test_each_node_sees_its_own_path_only(passed):
    config, _, hidden, _ = passed
    for row in range(ROWS):
        for node in range(NODES):
            np.testing.assert_allclose(hidden[row, node], alone(config, row, node)[0], atol=2e-5)


def test_nodes_really_differ_by_their_paths(passed):
    """Siblings' subtrees with the same token at the same level do not give the same: the mask is what is tested above."""
    config, before, hidden, _ = passed
    blind, _ = tree_pass(config, before, jnp.ones_like(sees()))
    assert float(jnp.abs(blind - hidden).max()) > 1e-2


def test_the_committed_cache_is_that_of_plain_decoding(passed):
    config, before, _, cache = passed
    ends = [7, 6, 4]
    path = np.zeros((ROWS, DEPTH + 1), np.int32)
    for row, node in enumerate(ends):
        path[row, : LEVELS[row, node] + 1] = path_to(row, node)
    committed = jax.jit(commit_path)(cache, jnp.asarray(path), jnp.asarray(LENGTHS - 1))
    for row, node in enumerate(ends):
        expected = alone(config, row, node)[1]
        filled = LENGTHS[row] + LEVELS[row, node]
        for layer in range(config.num_layers):
            np.testing.assert_allclose(
                committed.keys[layer][row, :, :, :filled], expected.keys[layer][:, :, :filled], atol=1e-5
            )
            np.testing.assert_allclose(committed.values[layer][row, :, :filled], expected.values[layer][:, :filled], atol=1e-5)
        # Nothing before the root was touched, and nothing is written past the path's places.
        untouched = np.r_[0 : LENGTHS[row] - 1, LENGTHS[row] + DEPTH : CAPACITY]
        np.testing.assert_array_equal(committed.keys[0][row][:, :, untouched], before.keys[0][row][:, :, untouched])


def test_nodes_may_come_level_by_level(passed):
    """As a drafter feeds them: fresh slots of earlier calls are seen by later ones."""
    config, before, hidden, cache = passed
    found, state = tree_pass(config, before, sees(), ((0, 1), (1, 2), (2, 5), (5, 8)))
    np.testing.assert_allclose(found, hidden, atol=2e-5)
    for a, b in zip(jax.tree.leaves(state.fresh), jax.tree.leaves(cache.fresh)):
        np.testing.assert_allclose(a, b, atol=2e-5)
    for a, b in zip(jax.tree.leaves(state.past), jax.tree.leaves(before)):
        np.testing.assert_array_equal(a, b)  # only read


def test_attention_in_parts_is_attention_over_all():
    """Against float64 numpy, with a query that sees nothing of one part."""
    rng = np.random.default_rng(5)
    q, k, v = rng.normal(size=(2, 3, 4, 8)), rng.normal(size=(2, 2, 8, 10)), rng.normal(size=(2, 2, 10, 8))
    visible = rng.random((2, 3, 10)) < 0.5
    visible[0, 1, :6], visible[..., 9] = False, True
    expected = np.zeros_like(q)
    for b, t, n in np.ndindex(2, 3, 4):
        scores = np.where(visible[b, t], q[b, t, n] @ k[b, n // 2], -np.inf)
        weights = np.exp(scores - scores.max())
        expected[b, t, n] = weights / weights.sum() @ v[b, n // 2]
    whole = masked_attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(visible))
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    # The same tokens, six of them in the cache and four fresh.
    past = KVCache((jnp.asarray(k[..., :6], jnp.float32),), (jnp.asarray(v[:, :, :6], jnp.float32),))
    fresh = KVCache((jnp.zeros((2, 2, 8, 4)),), (jnp.zeros((2, 2, 4, 8)),))
    visible[..., :6], sees = np.arange(6) < 5, visible[:, :, 6:]
    attend = tree_attention(
        jnp.full((2, 4), 5), jnp.full(2, 5), jnp.asarray(np.pad(sees, ((0, 0), (0, 1), (0, 0)), mode="edge")),
        jnp.full((2, 4), 5), 0,
    )  # fmt: skip
    out, _ = attend(
        jnp.asarray(np.pad(q, ((0, 0), (0, 1), (0, 0), (0, 0))), jnp.float32),
        jnp.asarray(k[..., 6:].transpose(0, 3, 1, 2), jnp.float32),
        jnp.asarray(v[:, :, 6:].swapaxes(1, 2), jnp.float32),
        layer=0, window=None, cache=TreeCache(past, fresh),
    )  # fmt: skip
    whole = masked_attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(visible))
    np.testing.assert_allclose(out[:, :3], whole, atol=1e-5)


def test_rows_are_written_where_they_start():
    out = write_rows(jnp.zeros((2, 6, 3)), jnp.ones((2, 2, 3)), jnp.array([1, 3]), 1)
    np.testing.assert_array_equal(out[..., 0], [[0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0]])
    out = write_rows(jnp.zeros((2, 3, 6), jnp.bfloat16), jnp.ones((2, 3, 2)), jnp.array([4, 0]), 2)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out[:, 2], [[0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]])
