"""History lookup against a plain Python search over texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.speculation.history import SEPARATOR, UNALIGNED, History, best_of
from adrl_jax.speculation.ngram import Ngram

ROWS, SIZE, CAPACITY, DEPTH = 300, 48, 24, 5


def join(texts):
    ids = []
    for text in texts:
        ids += ([SEPARATOR] if ids else []) + list(text)
    return ids[-SIZE:]


def suffix(before, row, longest):
    """How many last tokens of two texts agree."""
    n = 0
    while n < min(longest, len(before), len(row)) and before[-1 - n] == row[-1 - n]:
        n += 1
    return n


def lookup(reference, row, depth, longest, shortest, votes=1, own=False, pinned=None):
    """The definition: of all places that go on, those of the longest match, the latest `votes`; (tokens, matched)."""
    text = reference + [SEPARATOR] + (row if own else [])
    found = []
    for place in range(1, len(text)):
        start = max((i + 1 for i in range(place) if text[i] == SEPARATOR), default=0)
        n = suffix(text[start:place], row, longest)
        if n >= shortest and text[place] != SEPARATOR:
            found.append((place == pinned, n, place))
    if not found:
        return [], 0
    first, n, _ = max(found)
    voters = []
    for place in [p for is_pinned, m, p in sorted(found, reverse=True) if (is_pinned, m) == (first, n)][:votes]:
        copy = text[place:]
        if place > len(reference):  # the copy reads its own output
            copy = (copy * depth)[:depth]
        voters.append(copy[: copy.index(SEPARATOR)] if SEPARATOR in copy else copy)
    tokens = []
    while len(tokens) < depth:
        ballot = [v[len(tokens)] for v in voters if len(v) > len(tokens)]
        if not ballot:
            break
        tokens.append(max(ballot, key=ballot.count))  # the first of the most frequent ones
        voters = [v for v in voters if v[: len(tokens)] == tokens]
    return tokens, longest if first else n


def pack(rows, width, fill):
    out = np.full((len(rows), width), fill, np.int32)
    for b, row in enumerate(rows):
        out[b, : len(row)] = row
    return jnp.asarray(out), jnp.array([len(r) for r in rows], jnp.int32)


_match = jax.jit(lambda drafter, state, tokens, length: drafter.match(state, tokens, length, DEPTH), static_argnums=0)


def match(drafter, references, rows, offsets=None, junk=3):
    """`junk`: what lies past the ends of references and rows, a token that occurs in them."""
    missing = [[]] * (ROWS - len(rows))  # one size, so that each drafter is compiled once
    reference, reference_length = pack([*references, *missing], SIZE, junk)
    tokens, length = pack([*rows, *missing], CAPACITY, junk)
    offset = None if offsets is None else jnp.asarray(offsets, jnp.int32)
    state = drafter.with_references(
        drafter.init_state(ROWS, CAPACITY), jnp.ones(ROWS, bool), reference, reference_length, offset
    )
    return jax.tree.map(lambda x: x[: len(rows)], _match(drafter, state, tokens, length))


def random_case(count=ROWS, seed=0, vocab=4):
    rng = np.random.default_rng(seed)
    references, rows = [], []
    for _ in range(count):
        texts = [rng.integers(1, vocab, rng.integers(1, 20)).tolist() for _ in range(rng.integers(0, 5))]
        references.append(join(texts))
        rows.append(rng.integers(1, vocab, rng.integers(1, CAPACITY + 1)).tolist())
    return references, rows


def check(found, b, expected, matched):
    assert found.count[b] == len(expected) and found.matched[b] == matched
    np.testing.assert_array_equal(found.tokens[b, : len(expected)], expected)
    assert (found.tokens[b] >= 0).all()


@pytest.mark.parametrize("own_text", [False, True])
@pytest.mark.parametrize("longest, shortest, votes, vocab", [(8, 2, 8, 4), (8, 2, 1, 4), (3, 1, 3, 6), (1, 1, 50, 4)])
def test_lookup_is_the_definition(longest, shortest, votes, vocab, own_text):
    references, rows = random_case(vocab=vocab)
    found = match(History(SIZE, longest, shortest, votes, own_text), references, rows)
    hits = changed = 0
    for b, row in enumerate(rows):
        expected, n = lookup(references[b], row, DEPTH, longest, shortest, votes, own_text)
        check(found, b, expected, n)
        hits += n > 0
        changed += expected != lookup(references[b], row, DEPTH, longest, shortest, 1, own_text)[0]
    assert 20 < hits < len(rows)
    assert (changed > 10) == (votes > 1)


@pytest.mark.parametrize("size", [1, 300])
def test_the_best_are_those_of_a_sort(size):
    rng = np.random.default_rng(size)
    rank = rng.integers(0, 9, (60, size)) * size + np.arange(size)
    rank = np.where(rng.random((60, size)) < rng.random((60, 1)) ** 3, rank, -1)
    rank[0] = -1
    expected = np.full((60, 8), -1)
    expected[:, : min(size, 8)] = -np.sort(-rank, axis=1)[:, :8]
    np.testing.assert_array_equal(jax.jit(best_of, static_argnums=1)(jnp.asarray(rank, jnp.int32), 8), expected)


def test_votes_are_counted_token_by_token():
    reference = [join([[1, 2, 3, 4, 9], [1, 2, 3, 4, 8], [1, 2, 7, 5, 5], [1, 2, 3, 6, 6], [1, 2, 7, 5, 5]])]
    # Two votes are a draw, and so are four; a draw goes to the most recent.
    for votes, expected in ((1, [7, 5, 5]), (2, [7, 5, 5]), (4, [7, 5, 5]), (5, [3, 4, 8])):
        found = match(History(SIZE, votes=votes, own_text=False), reference, [[1, 2]])
        np.testing.assert_array_equal(found.tokens[0, :3], expected)


def test_its_own_confidence_is_the_share_of_votes_and_a_vote_of_the_match():
    agreeing_two, split = [join([[5, 1, 2, 3, 4], [5, 1, 2, 3, 7]])], [join([[1, 2, 3], [1, 2, 4], [1, 2, 3]])]
    found = match(History(SIZE, own_text=False), agreeing_two + split + [join([[1, 2, 9]])], [[5, 1, 2], [1, 2], [1, 2]])
    assert found.count[0] == 2
    chance = np.exp(np.asarray(found.log_chance, np.float64))
    np.testing.assert_allclose(chance[0, :2], [(2 + 3 / 5) / 3, (1 + 4 / 6) / 3], rtol=1e-6)  # 3 of two, then 7 or 4
    np.testing.assert_allclose(chance[1, 0], (2 + 2 / 4) / 4, rtol=1e-6)
    np.testing.assert_allclose(chance[2, 0], (1 + 2 / 4) / 2, rtol=1e-6)
    assert (found.log_chance <= 0).all() and np.isfinite(found.log_chance).all()


def test_without_references_it_is_ngram():
    _, rows = random_case(seed=2)
    found = match(History(SIZE, 3, 1, votes=1), [[]] * len(rows), rows)
    tokens, length = pack(rows, CAPACITY, 3)
    plain = _match(Ngram(3, 1), None, tokens, length)
    np.testing.assert_array_equal(found.count, plain.count)
    np.testing.assert_array_equal(found.matched, plain.matched)
    usable = np.asarray(plain.count) > 0
    np.testing.assert_array_equal(found.tokens[usable], plain.tokens[usable])
    np.testing.assert_allclose(found.log_chance[usable], plain.log_chance[usable], rtol=1e-6)


def test_a_copy_ends_where_its_text_ends():
    drafter = History(SIZE, own_text=False)
    found = match(drafter, [join([[1, 2, 3, 4], [5, 6, 7]])] * 4, [[1, 2], [9, 5, 6], [3, 4], [6, 7]])
    np.testing.assert_array_equal(found.count, [2, 1, 0, 0])
    np.testing.assert_array_equal(found.tokens[:2], [[3, 4, 0, 0, 0], [7, 0, 0, 0, 0]])


def test_of_equal_matches_the_most_recent_text_wins_and_a_longer_one_beats_it():
    references = [join([[1, 2, 3, 4], [2, 3, 5]])] * 2
    found = match(History(SIZE, own_text=False), references, [[9, 2, 3], [1, 2, 3]])
    np.testing.assert_array_equal(found.tokens[:, 0], [5, 4])
    np.testing.assert_array_equal(found.matched, [2, 3])


def test_matches_do_not_reach_over_a_separator():
    found = match(History(SIZE, 8, 2, own_text=False), [join([[1, 2], [3, 4, 5]])], [[1, 2, 3]])
    assert found.count[0] == 0


@pytest.mark.parametrize("own_text", [False, True])
def test_positional_drafts_are_the_earlier_response_while_it_agrees(own_text):
    rng = np.random.default_rng(5)
    references, rows, offsets, expected = [], [], [], []
    drafter = History(SIZE, 6, 2, own_text=own_text, positional=True)
    pinned = 0
    for _ in range(ROWS):
        prompt = rng.integers(1, 4, rng.integers(3, 8)).tolist()
        earlier = rng.integers(1, 4, rng.integers(2, 14)).tolist()
        others = [rng.integers(1, 4, rng.integers(2, 12)).tolist() for _ in range(2)]
        reference = join([*others, prompt[-3:] + earlier])
        offset = len(reference) - len(earlier) - len(prompt)  # of absolute position 0, negative for long prompts
        row = prompt + earlier[: rng.integers(0, len(earlier) + 1)]
        if rng.random() < 0.5:
            row = row[: len(prompt)] + [1 + (t + (rng.random() < 0.3)) % 3 for t in row[len(prompt) :]]
        at = offset + len(row)
        aligned = max(len(prompt) - 3 + offset, 0)
        agrees = aligned < at < len(reference) and suffix(reference[aligned:at], row, 6) >= 2
        expected.append(lookup(reference, row, DEPTH, 6, 2, 8, own_text, pinned=at if agrees else None))
        if agrees:
            pinned += 1
            assert expected[-1] == (earlier[len(row) - len(prompt) :][:DEPTH], 6)
        references.append(reference), rows.append(row), offsets.append(offset)
    found = match(drafter, references, rows, offsets)
    for b, (tokens, n) in enumerate(expected):
        check(found, b, tokens, n)
    assert 100 < pinned < 290


def test_rows_without_an_earlier_response_of_their_own_ignore_the_option():
    references, rows = random_case(seed=3)
    plain, positional = (match(History(SIZE, positional=p), references, rows) for p in (False, True))
    jax.tree.map(np.testing.assert_array_equal, plain, positional)


def test_references_go_to_the_rows_taken_and_stay_through_growth_and_moves():
    drafter = History(6, own_text=False)
    state = drafter.init_state(3, 8)
    one, length = jnp.broadcast_to(jnp.array([1, 2, 3, 4, 5, 6]), (3, 6)), jnp.array([6, 6, 6])
    state = drafter.with_references(state, jnp.array([True, False, True]), one, length, jnp.array([0, 1, 2]))
    two = drafter.with_references(state, jnp.array([False, False, True]), one + 10, length - 1)
    np.testing.assert_array_equal(two.reference_length, [6, 0, 5])
    np.testing.assert_array_equal(two.offset, [0, UNALIGNED, UNALIGNED])
    np.testing.assert_array_equal(two.reference[:, 0], [1, SEPARATOR, 11])
    moved = jax.tree.map(lambda x: x[jnp.array([2, 0])], drafter.grow(two, 64))
    found = _match(drafter, moved, jnp.array([[12, 13], [2, 3]]), jnp.array([2, 2]))
    np.testing.assert_array_equal(found.tokens[:, :2], [[14, 15], [4, 5]])
    assert all(x.shape[0] == 3 for x in jax.tree.leaves(two))
    with pytest.raises(ValueError, match=r"\(3, 5\)"):
        drafter.with_references(state, jnp.ones(3, bool), one[:, :5], length)


def test_propose_is_the_match_and_states_keep_their_shapes():
    references, rows = random_case(seed=4)
    drafter = History(SIZE)
    reference, reference_length = pack(references, SIZE, 0)
    tokens, length = pack(rows, CAPACITY, 0)
    fresh = drafter.init_state(len(rows), CAPACITY)
    state = drafter.with_references(fresh, jnp.ones(len(rows), bool), reference, reference_length)
    state = drafter.advance(None, None, state, tokens, length, None, 1)
    np.testing.assert_array_equal(state.length, length)
    proposal, after = jax.jit(lambda s: drafter.propose(None, None, s, tokens, length, None, None, DEPTH))(state)
    found = _match(drafter, state, tokens, length)
    assert proposal.log_q is None and drafter.init_params(None) is None
    np.testing.assert_array_equal(proposal.tokens, found.tokens)
    np.testing.assert_array_equal(proposal.count, found.count)
    for other in (state, after):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), other) == jax.tree.map(lambda x: (x.shape, x.dtype), fresh)


def test_an_empty_row_proposes_nothing():
    drafter = History(SIZE, 4, 1)
    found = match(drafter, [[3, 3, 3, 3]], [[]])
    np.testing.assert_array_equal(found.count, [0])


@pytest.mark.parametrize(
    "sizes, text", [((0,), "reference_capacity=0"), ((8, 2, 3), "min_ngram=3"), ((8, 2, 0), "min_ngram=0")]
)
def test_wrong_sizes_are_refused(sizes, text):
    with pytest.raises(ValueError, match=text):
        History(*sizes)
