"""What the neural drafters must do alike: lazy filling, forgetting their own drafts, rows that lag, grow, move or are full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from adrl_jax.sampling.law import Law
from adrl_jax.speculation import verify
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.history import History
from adrl_jax.speculation.merged import Merged
from adrl_jax.speculation.model import ModelDrafter

ROWS, CAPACITY, DEPTH = 3, 20, 4
DRAFTERS = {
    "eagle": Eagle(tiny.LLAMA),
    "model": ModelDrafter(tiny.LLAMA, tiny.SIZES["vocab_size"]),
    # Without references it has nothing to copy, so it must do what its learned drafter does.
    "merged": Merged(History(8, own_text=False), Eagle(tiny.LLAMA)),
}


class Bench:
    """One drafter on fixed rows of text."""

    def __init__(self, drafter, method="rejection", capacity=CAPACITY):
        self.drafter, self.capacity = drafter, capacity
        self.target = tiny.target_params(tiny.LLAMA)
        self.params = tiny.drafter_params(drafter, 1)
        self.tokens = tiny.random_rows(ROWS, capacity)
        self.hidden = tiny.hidden_states(tiny.LLAMA, self.target, self.tokens)
        self.lag = 1 if drafter.uses_hidden else 0
        keys, temperature = tiny.request_keys(ROWS), jnp.array([1.0, 0.7, 0.0])
        draw = verify.make_draw(method, temperature, keys, Law())
        self._advance = jax.jit(
            lambda state, tokens, length, hidden, width: drafter.advance(
                self.params, self.target, state, tokens, length, hidden, width
            ),
            static_argnums=4,
        )
        self._propose = jax.jit(
            lambda state, tokens, length, depth: drafter.propose(
                self.params, self.target, state, tokens, length, self.hidden, draw, depth
            ),
            static_argnums=3,
        )

    def advance(self, state, length, width):
        # What lies past the confirmed text must not matter.
        places, length = np.arange(self.capacity), np.asarray(length)
        tokens = np.where(places < length[:, None], self.tokens, 7)
        hidden = np.where((places < length[:, None] - 1)[..., None], self.hidden, np.float32(1e3))
        return self._advance(state, tokens, length, hidden, width)

    def propose(self, state, length, depth=DEPTH):
        return self._propose(state, self.tokens, length, depth)

    def fresh(self):
        return self.drafter.init_state(ROWS, self.capacity)


@pytest.fixture(scope="module", params=sorted(DRAFTERS))
def bench(request):
    return Bench(DRAFTERS[request.param])


def same(one, other):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.count, other.count)
    np.testing.assert_allclose(one.log_q, other.log_q, atol=2e-5)


def test_lazy_filling_equals_filling_at_once(bench):
    length = jnp.array([7, 12, 3])
    at_once = bench.advance(bench.fresh(), length, CAPACITY)
    np.testing.assert_array_equal(at_once.length, length - bench.lag)
    by_bits = bench.advance(bench.fresh(), jnp.array([4, 2, 3]), 4)
    for reached in ([5, 6, 3], [7, 9, 3], [7, 12, 3]):
        by_bits = bench.advance(by_bits, jnp.array(reached), 4)
    np.testing.assert_array_equal(by_bits.length, at_once.length)
    same(bench.propose(by_bits, length)[0], bench.propose(at_once, length)[0])


def test_a_lagging_row_fills_width_entries_a_call_and_does_not_propose(bench):
    length = jnp.array([15, 3, 9])
    state = bench.advance(bench.fresh(), length, 4)
    np.testing.assert_array_equal(state.length, np.minimum(4, length - bench.lag))
    np.testing.assert_array_equal(bench.propose(state, length)[0].count, [0, DEPTH, 0])
    for _ in range(3):
        state = bench.advance(state, length, 4)
    proposal = bench.propose(state, length)[0]
    np.testing.assert_array_equal(proposal.count, [DEPTH] * 3)
    same(proposal, bench.propose(bench.advance(bench.fresh(), length, CAPACITY), length)[0])


def test_own_drafts_leave_no_trace(bench):
    before, after = jnp.array([5, 9, 3]), jnp.array([6, 12, 4])
    filled = bench.advance(bench.fresh(), before, CAPACITY)
    _, touched = bench.propose(filled, before)
    np.testing.assert_array_equal(touched.length, filled.length)
    same(
        bench.propose(bench.advance(touched, after, DEPTH + 1), after)[0],
        bench.propose(bench.advance(filled, after, DEPTH + 1), after)[0],
    )


def test_nothing_is_slid_back_at_the_end_of_a_row(bench):
    near = jnp.array([CAPACITY - 1, CAPACITY, CAPACITY - 3])
    at_once = bench.advance(bench.fresh(), near, CAPACITY)
    state = bench.advance(bench.fresh(), near - 2, CAPACITY)
    state = bench.advance(state, near, 8)  # 8 entries from there would end past the capacity
    np.testing.assert_array_equal(state.length, near - bench.lag)
    same(bench.propose(state, near, 1)[0], bench.propose(at_once, near, 1)[0])
    # Speculative writes past the capacity must not damage what later passes read.
    _, touched = bench.propose(state, near)
    same(bench.propose(bench.advance(touched, near, 1), near, 1)[0], bench.propose(at_once, near, 1)[0])


def test_states_grow_and_rows_move(bench):
    length = jnp.array([7, 12, 3])
    state = bench.advance(bench.fresh(), length, CAPACITY)
    grown = bench.drafter.grow(state, CAPACITY + 12)
    assert jax.tree.structure(grown) == jax.tree.structure(bench.drafter.init_state(ROWS, CAPACITY + 12))
    same(bench.propose(grown, length)[0], bench.propose(state, length)[0])
    assert all(x.shape[0] == ROWS for x in jax.tree.leaves(state))
    order = jnp.array([1, 1, 1])
    moved = jax.tree.map(lambda x: x[order], state)
    # Rows 1 and 2 have noise of their own but row 1 of both has the same law first.
    np.testing.assert_allclose(
        bench.propose(moved, length[order])[0].log_q[1], bench.propose(state, length)[0].log_q[1], atol=2e-5
    )
    with pytest.raises(ValueError, match="capacity=4"):
        bench.drafter.grow(state, 4)


def test_shapes_are_those_a_loop_needs(bench):
    state, length = bench.fresh(), jnp.array([7, 12, 3])
    advanced = bench.advance(state, length, 3)
    _, proposed = bench.propose(advanced, length)
    for other in (advanced, proposed):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), other) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


def test_an_empty_row_proposes_nothing(bench):
    length = jnp.array([1, 0, 1]) * bench.lag
    state = bench.advance(bench.fresh(), length, 2)
    np.testing.assert_array_equal(state.length, [0, 0, 0])
    np.testing.assert_array_equal(bench.propose(state, length)[0].count, [0, 0, 0])


def test_the_target_as_its_own_drafter_is_always_right():
    drafter = DRAFTERS["model"]
    target = tiny.target_params(tiny.LLAMA)
    keys, temperature = tiny.request_keys(ROWS), jnp.array([1.0, 0.7, 0.0])
    tokens, length = tiny.random_rows(ROWS, CAPACITY), jnp.array([5, 9, 2])
    draw = verify.make_draw("coupled", temperature, keys, Law())

    @jax.jit
    def propose():
        state = drafter.advance(target, target, drafter.init_state(ROWS, CAPACITY), tokens, length, None, CAPACITY)
        return drafter.propose(target, target, state, tokens, length, None, draw, DEPTH)[0]

    proposal = propose()
    positions = length[:, None] + jnp.arange(DEPTH + 1)
    rows = jnp.arange(ROWS)[:, None]
    text = tokens.at[rows, positions[:, :-1]].set(proposal.tokens)
    hidden = tiny.hidden_states(tiny.LLAMA, target, text)
    logits = jnp.take_along_axis(hidden, (positions - 1)[..., None], axis=1) @ target["head"]
    decide = jax.jit(verify.coupled, static_argnames="law")
    verdict = decide(logits, proposal.tokens, proposal.count, temperature, keys, positions, law=Law())
    np.testing.assert_array_equal(verdict.count, [DEPTH + 1] * ROWS)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_every_family_has_an_eagle(family):
    config = tiny.FAMILIES[family]
    drafter, target = Eagle(config), tiny.target_params(config)
    params, tokens, length = tiny.drafter_params(drafter, 0), tiny.random_rows(2, 12), jnp.array([5, 9])
    assert set(params) == {"fc", "layer"} and "input_norm" not in params["layer"]
    hidden = jax.random.normal(jax.random.key(0), (2, 12, config.hidden_size))
    draw = verify.make_draw("rejection", jnp.ones(2), tiny.request_keys(2), Law())

    @jax.jit
    def run(tokens):
        state = drafter.advance(params, target, drafter.init_state(2, 12), tokens, length, hidden, 12)
        return drafter.propose(params, target, state, tokens, length, hidden, draw, 3)[0]

    proposal = run(tokens)
    assert proposal.tokens.shape == (2, 3) and proposal.log_q.shape == (2, 3, 40)
    np.testing.assert_allclose(jnp.exp(proposal.log_q).sum(-1), 1, atol=1e-5)
    assert (proposal.count == 3).all()


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_fresh_parameters_are_finite_and_depend_on_the_key(name):
    drafter = DRAFTERS[name]
    one, other = (jax.jit(drafter.init_params)(jax.random.key(seed)) for seed in (0, 1))
    assert jax.tree.structure(one) == jax.tree.structure(tiny.drafter_params(drafter, 0))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(one))
    assert any(bool(jnp.any(a != b)) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)))
