"""Which of two drafters speaks for a row, and with which law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lookup_world import OTHER, TableDrafter, V

from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law
from adrl_jax.speculation import verify
from adrl_jax.speculation.drafter import Proposal
from adrl_jax.speculation.history import History
from adrl_jax.speculation.merged import Merged
from adrl_jax.speculation.ngram import Ngram

DEPTH, SIZE = 4, 10
LOOKUP = History(SIZE, max_ngram=4, min_ngram=1, own_text=False)
MERGED = Merged(LOOKUP, TableDrafter(), min_match=3)
REFERENCE = [1, 2, 1, 4, 0, 2, 1, 0, 4, 4]
ROWS = {  # a row by how many of its last tokens are found in the reference, and what follows there
    4: ([0, 1, 2, 1, 4], [0, 2, 1, 0]),
    3: ([0, 3, 2, 1, 0], [4, 4]),
    2: ([4, 3, 3, 4, 0], [2, 1, 0, 4]),
    1: ([0, 0, 3, 3, 2], [1, 0, 4, 4]),
    0: ([0, 0, 0, 0, 3], None),
}


def setting(method, rows=tuple(ROWS), filled=None, reference=REFERENCE, drafter=MERGED):
    tokens = jnp.asarray([ROWS[r][0] for r in rows], jnp.int32)
    length = jnp.full(len(rows), 5, jnp.int32)
    state = drafter.init_state(len(rows), 8)
    if drafter.reference_capacity:
        ids = jnp.broadcast_to(jnp.asarray(reference, jnp.int32), (len(rows), SIZE))
        state = drafter.with_references(state, jnp.ones(len(rows), bool), ids, jnp.full(len(rows), SIZE, jnp.int32))
    state = drafter.advance(jnp.asarray(OTHER), None, state, tokens, length, None, 5)
    if filled is not None:
        state = state._replace(learned=state.learned._replace(length=jnp.asarray(filled, jnp.int32)))
    keys = jnp.asarray(noise.request_keys(0, np.arange(len(rows)), 0, 0))
    draw = verify.make_draw(method, jnp.ones(len(rows)), keys, Law())

    def propose(which, state):
        return jax.jit(lambda s: which.propose(jnp.asarray(OTHER), None, s, tokens, length, None, draw, DEPTH))(state)

    return state, propose, (tokens, length)


def matched_of(reference, row):
    """Longest suffix of the row that occurs in the reference with a token after it, at most 4."""
    return max(
        (n for n in range(1, 5) for e in range(n, SIZE) if reference[e - n : e] == row[-n:]),
        default=0,
    )


def test_the_rows_of_this_file_are_what_they_are_called():
    state, _, (tokens, length) = setting("coupled")
    found = LOOKUP.match(state.lookup, tokens, length, DEPTH)
    for b, (_, expected) in enumerate(ROWS.values()):
        assert found.count[b] == len(expected or [])
        np.testing.assert_array_equal(found.tokens[b, : found.count[b]], expected or [])
    np.testing.assert_array_equal(found.matched, [matched_of(REFERENCE, row) for row, _ in ROWS.values()])


@pytest.mark.parametrize("method", verify.METHODS)
def test_long_matches_are_copied_and_the_rest_is_drawn(method):
    state, propose, _ = setting(method)
    proposal, after = propose(MERGED, state)
    drawn, _ = propose(MERGED.learned, state.learned)
    matched = [matched_of(REFERENCE, row) for row, _ in ROWS.values()]
    assert sorted(m >= 3 for m in matched) == [False, False, False, True, True]
    for b, (m, (_, copied)) in enumerate(zip(matched, ROWS.values())):
        expected = np.array(copied) if m >= 3 else np.asarray(drawn.tokens[b])
        assert proposal.count[b] == len(expected)
        np.testing.assert_array_equal(proposal.tokens[b, : len(expected)], expected)
    if method == "coupled":
        assert proposal.log_q is None and drawn.log_q is None
    else:
        law = np.exp(np.asarray(proposal.log_q))
        np.testing.assert_allclose(law.sum(-1), 1, atol=1e-5)
        for b, m in enumerate(matched):
            expected = np.eye(V)[np.asarray(proposal.tokens[b])] if m >= 3 else np.exp(drawn.log_q[b])
            np.testing.assert_allclose(law[b], expected, atol=1e-6)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_each_row_is_as_sure_as_the_drafter_that_speaks_for_it():
    state, _, (tokens, length) = setting("coupled")
    keys = jnp.asarray(noise.request_keys(0, np.arange(len(ROWS)), 0, 0))
    draw = verify.make_draw("coupled", jnp.ones(len(ROWS)), keys, Law(), log_chance=True)
    ask = (jnp.asarray(OTHER), None)
    proposal, _ = MERGED.propose(*ask, state, tokens, length, None, draw, DEPTH)
    drawn, _ = MERGED.learned.propose(*ask, state.learned, tokens, length, None, draw, DEPTH)
    copied = LOOKUP.match(state.lookup, tokens, length, DEPTH)
    expected = np.where((np.asarray(copied.matched) >= 3)[:, None], copied.log_chance, drawn.log_q[..., 0])
    np.testing.assert_allclose(proposal.log_chance, expected, rtol=1e-6)


def test_two_lookups_are_deterministic_together():
    drafter = Merged(LOOKUP, Ngram(1, 1), min_match=3)
    state, propose, _ = setting("rejection", drafter=drafter)
    proposal, _ = propose(drafter, state)
    assert proposal.log_q is None


def test_a_learned_drafter_that_lags_leaves_its_rows_to_the_lookup():
    state, propose, _ = setting("rejection", filled=[5, 3, 3, 5, 3])
    proposal, _ = propose(MERGED, state)
    drawn, _ = propose(MERGED.learned, state.learned)
    for b in (0, 1, 2):  # copied: the match is long, or there is nothing else
        expected = list(ROWS.values())[b][1]
        np.testing.assert_array_equal(proposal.tokens[b, : proposal.count[b]], expected)
        np.testing.assert_allclose(np.exp(proposal.log_q[b]), np.eye(V)[np.asarray(proposal.tokens[b])])
    np.testing.assert_array_equal(proposal.tokens[3], drawn.tokens[3])
    np.testing.assert_array_equal(proposal.count[3:], [DEPTH, 0])


@pytest.mark.parametrize("method", verify.METHODS)
def test_a_round_without_a_draw_is_the_same_as_one_with(method):
    """Where all rows have long matches the learned drafter is not asked; its neighbours do not matter to a row."""
    alone, propose, _ = setting(method, rows=(4, 3))
    short, _ = propose(MERGED, alone)
    both, propose, _ = setting(method, rows=(4, 3, 0))
    long, _ = propose(MERGED, both)
    for x, y in zip(jax.tree.leaves(short), jax.tree.leaves(long), strict=True):
        np.testing.assert_array_equal(x, y[:2])


def test_the_draw_is_really_skipped():
    """A learned drafter that says what it likes when asked, and a round in which nobody asks."""

    class Loud(TableDrafter):
        def propose(self, params, target_params, state, tokens, length, hidden, draw, depth):
            jax.debug.callback(lambda: asked.append(1))
            return Proposal(jnp.zeros((len(length), depth), jnp.int32), jnp.full(len(length), depth), None), state

    drafter = Merged(LOOKUP, Loud(), min_match=3)
    for rows, times in (((4, 3), 0), ((4, 0), 1)):
        asked = []
        state, propose, _ = setting("coupled", rows=rows, drafter=drafter)
        jax.block_until_ready(propose(drafter, state))
        jax.effects_barrier()
        assert len(asked) == times


def test_its_length_is_the_learned_drafters_and_growing_keeps_references():
    state, _, _ = setting("coupled", filled=[5, 3, 3, 5, 3])
    np.testing.assert_array_equal(state.length, [5, 3, 3, 5, 3])
    grown = MERGED.grow(state, 64)
    np.testing.assert_array_equal(grown.lookup.reference, state.lookup.reference)
    moved = jax.tree.map(lambda x: x[jnp.array([1, 0])], grown)
    np.testing.assert_array_equal(moved.length, [3, 5])
    assert MERGED.reference_capacity == SIZE and not MERGED.uses_hidden and not MERGED.positional
    assert Merged(History(SIZE, positional=True), TableDrafter()).positional
    assert MERGED.init_params(jax.random.key(0)).shape == (V, V, V)


def test_wrong_parts_are_refused():
    with pytest.raises(ValueError, match=r"Merged.lookup=TableDrafter"):
        Merged(TableDrafter(), Ngram())
    for least in (0, 5):
        with pytest.raises(ValueError, match=rf"min_match={least}.*\[1, 4\].*'history'"):
            Merged(LOOKUP, TableDrafter(), least)
    drafter = Merged(Ngram(), TableDrafter(), 2)
    assert drafter.reference_capacity == 0
    with pytest.raises(ValueError, match="'ngram' of 'merged' takes no references"):
        drafter.with_references(drafter.init_state(2, 8), None, None, None)
