"""Prompt lookup against a plain Python search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.speculation.ngram import Ngram


def lookup(text, depth, longest, shortest):
    """The definition: longest suffix first, most recent match, then copying on from the text plus the copy itself."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                out = list(text)
                for i in range(depth):
                    out.append(out[end + i])
                return out[len(text) :]
    return None


def propose(drafter, rows, capacity, depth):
    tokens = np.zeros((len(rows), capacity), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    length = jnp.array([len(r) for r in rows], jnp.int32)
    state = drafter.init_state(len(rows), capacity)
    run = jax.jit(lambda tokens, length: drafter.propose(None, None, state, tokens, length, None, None, depth)[0])
    return run(jnp.asarray(tokens), length)


@pytest.mark.parametrize("longest, shortest", [(3, 1), (4, 2), (1, 1)])
def test_lookup_is_the_definition(longest, shortest):
    rng = np.random.default_rng(0)
    rows = [list(map(int, rng.integers(1, 4, size=n))) for n in rng.integers(1, 24, size=200)]
    rows += [[7], [7, 7], [5, 6, 5], list(range(1, 25))]
    proposal = propose(Ngram(longest, shortest), rows, 24, 6)
    assert proposal.log_q is None
    for b, row in enumerate(rows):
        expected = lookup(row, 6, longest, shortest)
        assert proposal.count[b] == (0 if expected is None else 6)
        if expected is not None:
            np.testing.assert_array_equal(proposal.tokens[b], expected)


def test_what_lies_past_the_length_is_not_read():
    drafter, length = Ngram(), jnp.array([5], jnp.int32)
    clean = jnp.array([[1, 2, 3, 1, 2, 0, 0, 0]])
    stale = jnp.array([[1, 2, 3, 1, 2, 9, 1, 2]])
    results = [drafter.propose(None, None, drafter.init_state(1, 8), t, length, None, None, 4)[0] for t in (clean, stale)]
    np.testing.assert_array_equal(results[0].tokens, [[3, 1, 2, 3]])
    np.testing.assert_array_equal(results[0].tokens, results[1].tokens)


def test_state_follows_the_length():
    drafter = Ngram()
    state = drafter.advance(None, None, drafter.init_state(2, 8), jnp.zeros((2, 8), jnp.int32), jnp.array([3, 5]), None, 1)
    np.testing.assert_array_equal(state.length, [3, 5])
    assert drafter.grow(state, 16) is state and drafter.init_params(None) is None


@pytest.mark.parametrize("sizes", [(0, 1), (2, 3), (3, 0)])
def test_wrong_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="ngram"):
        Ngram(*sizes)
