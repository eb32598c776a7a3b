"""Trees of the EAGLE drafter: each node as if its path had been drafted alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from adrl_jax.sampling.law import Law, log_law
from adrl_jax.speculation import verify
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.eagle_tree import propose_tree
from adrl_jax.speculation.strategy import Strategy
from adrl_jax.speculation.tree import belief, make_branch

ROWS, CAPACITY = 3, 20
TEMPERATURE, LENGTH = jnp.array([1.0, 0.7, 1.3]), jnp.array([7, 12, 3])


class Bench:
    """An EAGLE drafter on fixed rows of text, its state complete."""

    def __init__(self, config, **options):
        self.drafter, self.target = Eagle(config, **options), tiny.target_params(config)
        self.params = tiny.drafter_params(Eagle(config), 1)
        if "draft_vocab_size" in options:
            self.params = {**self.params, "draft_ids": jnp.array([1, 4, 7, 8, 20, 33, 34, 39])}
        self.keys, self.tokens = tiny.request_keys(ROWS), tiny.random_rows(ROWS, CAPACITY)
        self.hidden = tiny.hidden_states(config, self.target, self.tokens)
        self.state = self.advance(self.drafter.init_state(ROWS, CAPACITY), CAPACITY)

    def advance(self, state, width):
        run = jax.jit(self.drafter.advance, static_argnums=6)
        return run(self.params, self.target, state, self.tokens, LENGTH, self.hidden, width)

    @functools.cache  # noqa: B019 (benches live as long as their tests)
    def _tree(self, strategy, method):
        def run(params, state, length):
            branch = make_branch(method, strategy.width, TEMPERATURE, self.keys, Law())
            weights = belief(method, jnp.zeros(ROWS, jnp.int32), jnp.zeros(ROWS, jnp.int32), strategy.depth)
            return propose_tree(self.drafter, params, self.target, state, self.tokens, length, branch, weights, strategy)

        return jax.jit(run)

    def tree(self, strategy, method="rejection", state=None, params=None, length=LENGTH):
        run = self._tree(strategy, method)
        return run(self.params if params is None else params, self.state if state is None else state, length)

    @functools.cached_property
    def _chain(self):
        def run(path):
            def draw(logits, positions):
                at = jnp.clip(positions - LENGTH[:, None], 0, path.shape[1] - 1)
                return jnp.take_along_axis(path, at, axis=1), log_law(logits, TEMPERATURE[:, None], Law())

            depth = path.shape[1]
            arguments = (self.params, self.target, self.state, self.tokens, LENGTH, self.hidden, draw, depth)
            return self.drafter.propose(*arguments)[0].log_q

        return jax.jit(run)

    def chain(self, path):
        """Laws at each place when the drafter is made to draft `path` `[B, depth]`."""
        return np.asarray(self._chain(jnp.asarray(path)))


@pytest.fixture(scope="module")
def bench():
    return Bench(tiny.LLAMA)


def path_to(tree, row, node, depth):
    path = []
    while tree.levels[row, node]:
        path.append(int(tree.tokens[row, node]))
        node = tree.parents[row, node]
    path = path[::-1]
    return path + [0] * (depth - len(path))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
def test_each_node_is_drafted_as_if_its_path_were_alone(family):
    bench, strategy = Bench(tiny.FAMILIES[family]), Strategy("eagle", 4, 3, 14)
    tree = jax.tree.map(np.asarray, bench.tree(strategy))
    seen = 0
    for node in range(14):
        laws = bench.chain(np.array([path_to(tree, row, node, 4) for row in range(ROWS)]))
        for row in range(ROWS):
            if (tree.parents[row, 1:] == node).any():
                np.testing.assert_allclose(tree.log_q[row, tree.law[row, node]], laws[row, tree.levels[row, node]], atol=2e-5)
                seen += 1
    assert seen >= 15 and tree.levels.max() == 4 and tree.usable[:, 1:].all() and not tree.bad.any()


def test_a_reduced_vocabulary_drafts_its_ids_only():
    bench = Bench(tiny.LLAMA, draft_vocab_size=8)
    for method in verify.METHODS:
        tree = bench.tree(Strategy("eagle", 3, 3, 10), method)
        assert np.isin(np.asarray(tree.tokens)[np.asarray(tree.usable)], bench.params["draft_ids"]).all()
        assert tree.usable[:, 1:].all()


@pytest.mark.parametrize("method", verify.METHODS)
@pytest.mark.parametrize("depth", [1, 4])
def test_a_tree_of_width_one_is_the_drafters_chain(bench, method, depth):
    draw = verify.make_draw(method, TEMPERATURE, bench.keys, Law())
    arguments = (bench.params, bench.target, bench.state, bench.tokens, LENGTH, bench.hidden)
    proposal = jax.jit(lambda: bench.drafter.propose(*arguments, draw, depth)[0])()
    tree = bench.tree(Strategy("eagle", depth), method)
    np.testing.assert_array_equal(tree.tokens[:, 1:], proposal.tokens)
    last = np.asarray(bench.tokens)[np.arange(ROWS), np.asarray(LENGTH) - 1]
    np.testing.assert_array_equal(tree.tokens[:, 0], last)


def test_a_row_that_lags_or_is_empty_offers_nothing(bench):
    strategy = Strategy("eagle", 4, 3, 14)
    lagging = bench.advance(bench.drafter.init_state(ROWS, CAPACITY), 4)  # rows of 7 and 12 tokens are not complete yet
    tree = bench.tree(strategy, "coupled", lagging)
    np.testing.assert_array_equal(tree.usable[:, 1:].any(axis=1), [False, False, True])
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), bench.params)
    tree = bench.tree(strategy, "coupled", bench.state._replace(feature=bench.state.feature * jnp.nan), broken)
    assert tree.bad.all() and not tree.usable[:, 1:].any()
    assert (bench.tree(strategy, "coupled", lagging, broken).bad == jnp.array([False, False, True])).all()


def test_what_lies_past_a_rows_entries_does_not_matter(bench):
    strategy = Strategy("eagle", 4, 3, 14)
    filled = np.arange(CAPACITY) < np.asarray(LENGTH - 1)[:, None]
    cache = bench.state.cache._replace(
        keys=tuple(jnp.where(filled[:, None, None], k, 1e3) for k in bench.state.cache.keys),
        values=tuple(jnp.where(filled[:, None, :, None], v, 1e3) for v in bench.state.cache.values),
    )
    one, other = bench.tree(strategy), bench.tree(strategy, state=bench.state._replace(cache=cache))
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.log_q, other.log_q, atol=1e-5)


def test_trees_need_no_room_in_the_drafters_cache(bench):
    """Rows whose cache is full to the last entry still draft: nodes lie beside it."""
    full, strategy = jnp.full(ROWS, CAPACITY), Strategy("eagle", 4, 3, 14)
    advance = jax.jit(bench.drafter.advance, static_argnums=6)
    tight = advance(bench.params, bench.target, bench.state, bench.tokens, full, bench.hidden, CAPACITY)
    one = bench.tree(strategy, state=tight, length=full)
    other = bench.tree(strategy, state=bench.drafter.grow(tight, CAPACITY + 20), length=full)
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.log_q, other.log_q, atol=1e-5)
