"""Growing and pruning draft trees, against float64 oracles that know nothing of arrays."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law
from adrl_jax.sampling.noise import Role
from adrl_jax.speculation import tree, verify
from adrl_jax.speculation.drafter import draft_chain
from adrl_jax.speculation.strategy import Strategy

V, ROWS, LENGTH = 11, 6, 7
TABLE = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32) * 2
TEMPERATURE = np.array([0.0, 0.7, 1.0, 1.0, 1.4, 0.0], np.float32)
PASSES, COMMITTED = np.array([0, 3, 3, 50, 50, 50], np.int32), np.array([0, 4, 12, 60, 120, 200], np.int32)
SHAPES = [(1, 4, 4), (3, 1, 4), (2, 3, 9), (4, 3, 20), (3, 4, 37)]


def request_keys(rows, seed=0):
    return jnp.asarray(noise.request_keys(seed, np.arange(rows), 0, 0))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _grow(method, strategy, law, table, temperature, keys, past):
    last = jnp.arange(ROWS, dtype=jnp.int32)
    branch = tree.make_branch(method, strategy.width, temperature, keys, law)
    step = lambda carry, ids, parents, index: (table[ids], carry)  # noqa: E731
    weights = tree.belief(method, *past, strategy.depth)
    return tree.draft_tree(table[last], step, (), last, jnp.full(ROWS, LENGTH), branch, weights, strategy)[0]


def drafted(shape, method="coupled", table=TABLE, law=Law(), seed=0):  # noqa: B008 (frozen)
    """Trees of a bigram drafter: what follows a token depends on that token only. Row b starts from token b."""
    arguments = table, TEMPERATURE, request_keys(ROWS, seed), (PASSES, COMMITTED)
    return jax.tree.map(np.asarray, _grow(method, Strategy("x", *shape), law, *arguments))


def perturbed(row, level, last, role=Role.TARGET, seed=0):
    """The drafter's perturbed logits for the tokens of a level: float64 `[V]`."""
    keys = np.asarray(request_keys(ROWS, seed))
    bits = noise.bits(noise.position_keys(keys, np.full((ROWS, 1), LENGTH + level - 1), role)[row, 0], V)
    gumbel = -np.log(-np.log1p(-(bits + 0.5) / 2.0**32))
    return TABLE[last].astype(np.float64) + TEMPERATURE[row] * gumbel


def oracle(row, depth, width, count):
    """The paths kept, by brute force."""
    beam, pool = [(np.asarray(tree.belief("coupled", PASSES, COMMITTED, depth))[row], ())], []
    for level in range(1, depth + 1):
        found = []
        for chance, path in beam:
            scores = perturbed(row, level, path[-1] if path else row)
            steps = [np.exp(scores / e) / np.exp(scores / e).sum() for e in tree.DRAFT_ERRORS]
            found += [(chance * [s[x] for s in steps], (*path, int(x))) for x in np.argsort(-scores)[:width]]
        beam = sorted(found, key=lambda node: -node[0].sum())[:width]
        pool += found
    return {()} | {path for _, path in sorted(pool, key=lambda node: -node[0].sum())[: count - 1]}


def paths(drafts, row):
    """Each node's tokens from below the root on."""
    out = []
    for node in range(drafts.tokens.shape[1]):
        path, at = [], node
        while drafts.levels[row, at]:
            path.append(int(drafts.tokens[row, at]))
            at = drafts.parents[row, at]
        out.append(tuple(reversed(path)))
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_most_promising_nodes_are_kept(shape):
    drafts = drafted(shape)
    for row in range(ROWS):
        found = paths(drafts, row)
        assert set(found) == oracle(row, *shape) and len(set(found)) == len(found)


@pytest.mark.parametrize("method", verify.METHODS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_are_connected_and_ordered(shape, method):
    drafts = drafted(shape, method)
    depth, width, count = shape
    assert drafts.tokens.shape == (ROWS, count)
    np.testing.assert_array_equal(drafts.tokens[:, 0], np.arange(ROWS))
    assert (drafts.parents[:, 0] == 0).all() and (drafts.levels[:, 0] == 0).all() and not drafts.bad.any()
    for row, node in itertools.product(range(ROWS), range(1, count)):
        parent = drafts.parents[row, node]
        assert parent < node and drafts.levels[row, node] == drafts.levels[row, parent] + 1 <= depth
        assert drafts.levels[row, node] >= drafts.levels[row, node - 1]
        siblings = np.flatnonzero((drafts.parents[row] == parent) & (np.arange(count) > 0))
        assert len(siblings) <= width and (np.diff(siblings) == 1).all()
        assert len(set(drafts.tokens[row, siblings])) == len(siblings)
    assert drafts.usable[:, 1:].all()


def test_children_are_in_the_order_drawn():
    for method, role in (("coupled", Role.TARGET), ("rejection", Role.DRAFT)):
        drafts = drafted((4, 3, 20), method)
        for row, node in itertools.product(range(ROWS), range(20)):
            siblings = np.flatnonzero((drafts.parents[row] == node) & (np.arange(20) > 0))
            scores = perturbed(row, drafts.levels[row, node] + 1, drafts.tokens[row, node], role)
            np.testing.assert_array_equal(drafts.tokens[row, siblings], np.argsort(-scores)[: len(siblings)])


def test_the_shape_of_rejection_trees_does_not_depend_on_the_draws():
    """Else the law would be wrong; across rows, tables and seeds, parents are the same."""
    for shape in SHAPES:
        one = drafted(shape, "rejection")
        other = drafted(shape, "rejection", np.random.default_rng(5).normal(size=(V, V)).astype(np.float32), seed=9)
        assert (one.parents == one.parents[0]).all() and (other.parents == one.parents).all()


def test_rejection_trees_carry_the_laws_of_their_children():
    drafts = drafted((4, 3, 20), "rejection")
    for row, node in itertools.product(range(ROWS), range(20)):
        if (drafts.parents[row, 1:] == node).any():
            logits = TABLE[drafts.tokens[row, node]].astype(np.float64) / (TEMPERATURE[row] or 1.0)
            expected = logits - np.log(np.exp(logits).sum())
            np.testing.assert_allclose(drafts.log_q[row, drafts.law[row, node]], expected, atol=1e-5)


@pytest.mark.parametrize("method", verify.METHODS)
def test_a_tree_of_width_one_is_a_chain(method):
    drafts, keys, depth = drafted((3, 1, 4), method), request_keys(ROWS), 3
    draw = jax.jit(verify.make_draw(method, jnp.asarray(TEMPERATURE), keys, Law()))
    table, last = jnp.asarray(TABLE), jnp.arange(ROWS)
    step = lambda carry, ids, index: (table[ids], carry)  # noqa: E731
    chain = draft_chain(table[last][:, None], step, (), jnp.full(ROWS, LENGTH), draw, depth)[0]
    hot = TEMPERATURE > 0
    np.testing.assert_array_equal(drafts.tokens[hot, 1:], np.asarray(chain)[hot])


def test_children_are_drawn_without_replacement():
    rows, logits = 100_000, np.array([1.0, 0.0, -0.5, 0.3, 2.0], np.float32)
    branch = tree.make_branch("rejection", 2, jnp.ones(rows), request_keys(rows), Law())
    pairs = np.asarray(jax.jit(branch)(jnp.tile(logits, (rows, 1, 1)), jnp.full(rows, 3)).tokens[:, 0])
    q = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    expected = np.array([[0 if i == j else q[i] * q[j] / (1 - q[i]) for j in range(5)] for i in range(5)])
    counts = np.zeros((5, 5))
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    off = ~np.eye(5, dtype=bool)
    assert not counts[~off].any() and stats.chisquare(counts[off], rows * expected[off]).pvalue > 0.001


def test_chances_are_laws_of_perturbed_scores():
    scores = np.random.default_rng(2).normal(size=(3, 50)) * 4
    best = np.sort(scores, axis=-1)[:, ::-1][:, :4]
    found = tree.step_chances(jnp.asarray(scores, jnp.float32), jnp.asarray(best, jnp.float32))
    for i, error in enumerate(tree.DRAFT_ERRORS):
        exact = np.exp(best / error) / np.exp(scores / error).sum(-1, keepdims=True)
        np.testing.assert_allclose(found[..., i], exact, rtol=1e-4, atol=1e-7)
    # A sure thing has chance 1 and never more.
    sure = tree.step_chances(jnp.array([[300.0, 0.0, 0.0]]), jnp.array([[300.0, 0.0]]))
    assert (sure[0, 0] == 1).all() and (sure[0, 1] < 1e-30).all()
    # Chances come true where the drafter's error is what is assumed.
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(30_000, 12)) * 2
    order = np.argsort(-scores, axis=1)[:, :3]
    chances = tree.step_chances(jnp.asarray(scores), jnp.asarray(np.take_along_axis(scores, order, 1)))
    for i, error in enumerate(tree.DRAFT_ERRORS):
        winner = np.argmax(scores + error * rng.gumbel(size=scores.shape), axis=1)
        np.testing.assert_allclose(chances[..., i].mean(0), (order == winner[:, None]).mean(0), atol=0.012)


def test_beliefs_follow_the_past():
    passes = jnp.array([0, 1, 50, 50, 50, 3000, 3000])
    weights = np.asarray(tree.belief("coupled", passes, passes * jnp.array([1, 7, 1, 3, 6, 3, 6]), 6))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(weights[0], 1 / len(tree.DRAFT_ERRORS))  # nothing known
    assert (np.diff(weights[1]) > 0).all()  # all drafts stood, once: a small error is more likely, but not certain
    assert weights[1].max() < 0.5
    scale = weights @ np.array(tree.DRAFT_ERRORS)
    assert scale[2] > 1.2 > scale[3] > scale[4] and scale[4] < 0.4
    np.testing.assert_allclose(weights[5:], weights[3:5], atol=1e-4)  # a long past counts no more than a shorter one
    # What has been committed by passes that accept as often as an error of scale e is thought to let them speaks for e.
    for i, error in enumerate(tree.DRAFT_ERRORS):
        stands = 1 / (1 + error / 2)
        drafts = np.random.default_rng(i).random((1000, 6)) < stands
        committed = int((1 + np.cumprod(drafts, axis=1).sum(1)).sum())
        assert np.argmax(tree.belief("coupled", jnp.array([1000]), jnp.array([committed]), 6)) == i
    np.testing.assert_array_equal(tree.belief("rejection", passes, passes, 6), np.ones((7, 1)))


def test_filters_and_invalid_ids_leave_fewer_children():
    for method in verify.METHODS:
        drafts = drafted((2, 4, 12), method, law=Law(top_k=2, valid_vocab=8))
        assert (drafts.tokens[drafts.usable] < 8).all()
        counts = [np.sum(drafts.usable[row, 1:] & (drafts.parents[row, 1:] == 0)) for row in range(ROWS)]
        assert counts == [2] * ROWS
    drafts = drafted((2, 4, 12), law=Law(valid_vocab=3))
    assert (drafts.tokens[:, 1:] < 3).all() and drafts.usable[:, 1:].all()  # what is not possible takes no place
    drafts = drafted((2, 4, 12), "rejection", law=Law(valid_vocab=3))  # but here nothing may depend on the draws
    assert (drafts.tokens[drafts.usable] < 3).all() and drafts.usable[:, 1:4].all() and not drafts.usable[:, 4].any()
    # A reduced draft vocabulary is the same: logits of -inf.
    reduced = np.where(np.arange(V) < 3, TABLE, -np.inf).astype(np.float32)
    for method in verify.METHODS:
        drafts = drafted((2, 4, 12), method, table=reduced)
        assert (drafts.tokens[drafts.usable] < 3).all() and not drafts.bad.any()


@pytest.mark.parametrize("method", verify.METHODS)
def test_what_is_not_a_number_is_not_used(method):
    table = TABLE.copy()
    table[1:4, 5] = np.nan
    drafts = drafted((4, 3, 20), method, table)
    extended = (drafts.parents[:, 1:, None] == np.arange(20)) & drafts.usable[:, 1:, None]
    for row, node in itertools.product(range(ROWS), range(20)):
        if 1 <= drafts.tokens[row, node] <= 3:
            assert not extended[row, :, node].any()
    assert drafts.bad[1:4].all() and drafts.parents.max() < 20
    assert not drafted((4, 3, 20), method, np.full_like(TABLE, np.nan)).usable[:, 1:].any()


def test_ancestors():
    parents = jnp.array([[0, 0, 0, 1, 2, 3], [0, 0, 1, 1, 3, 4]])
    expected = [
        [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}, {0, 1, 3, 5}],
        [{0}, {0, 1}, {0, 1, 2}, {0, 1, 3}, {0, 1, 3, 4}, {0, 1, 3, 4, 5}],
    ]
    found = np.asarray(tree.ancestors(parents, 4))
    assert [[set(np.flatnonzero(node)) for node in row] for row in found] == expected


def test_equal_promises_keep_parents():
    """Everything hopeless: the first nodes are kept, so the tree is connected all the same."""
    promise = jnp.array([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]])
    parents = jnp.array([[0, 0, 0, 0, 2, 2, 1, 1]])
    kept, renamed = tree.select(promise, parents, 5)
    np.testing.assert_array_equal(kept, [[0, 1, 2, 3, 6]])
    np.testing.assert_array_equal(renamed, [[0, 0, 0, 0, 1]])


def test_a_width_past_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"width=12.*11 ids"):
        drafted((1, 12, 13))
    with pytest.raises(ValueError, match="typical"):
        tree.make_branch("typical", 2, jnp.ones(1), request_keys(1), Law())
