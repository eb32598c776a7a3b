"""Verification by hand-made cases: acceptance, residual law, log-probs, where rows end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law, log_law
from adrl_jax.sampling.noise import Role
from adrl_jax.speculation import verify
from adrl_jax.types import FinishReason

DRAWS = 200_000
coupled = jax.jit(verify.coupled, static_argnames="law")
rejection = jax.jit(verify.rejection, static_argnames="law")


def jitted_draw(method, temperature, keys, filters):
    return jax.jit(verify.make_draw(method, temperature, keys, filters))


def request_keys(rows, seed=0):
    return jnp.asarray(noise.request_keys(seed, np.arange(rows), 0, 0))


def one_step(p, q, seed=0, draws=DRAWS, filters=Law(), temperature=1.0):  # noqa: B008 (frozen)
    """One drafted position, drawn and verified `draws` times: committed tokens, acceptance, verdict."""
    keys, ones = request_keys(draws, seed), jnp.ones((draws, 1, 1))
    temperatures = jnp.full(draws, temperature)
    with np.errstate(divide="ignore"):
        target, drafter = ones * jnp.log(jnp.asarray(p)), ones * jnp.log(jnp.asarray(q))
    draw = jitted_draw("rejection", temperatures, keys, filters)
    drafts, log_q = draw(drafter, jnp.zeros((draws, 1), jnp.int32))
    logits = jnp.concatenate([target, target], axis=1)
    positions = jnp.tile(jnp.arange(2), (draws, 1))
    verdict = rejection(logits, drafts, jnp.ones(draws, jnp.int32), temperatures, keys, positions, law=filters, log_q=log_q)
    return np.asarray(verdict.tokens[:, 0]), np.asarray(verdict.count) == 2, verdict, np.exp(np.asarray(log_q[0, 0]))


def shares(tokens, size):
    return np.bincount(tokens, minlength=size) / len(tokens)


def test_residual_draws_give_back_exactly_the_target():
    tokens, accepted, _, _ = one_step([0.6, 0.3, 0.1], [0.2, 0.5, 0.3])
    np.testing.assert_allclose(shares(tokens, 3), [0.6, 0.3, 0.1], atol=0.005)
    assert accepted.mean() == pytest.approx(0.6, abs=0.005)
    # What is left over after a rejection is [1, 0, 0]; resuming from p instead gives [.44, .42, .14] overall.
    assert set(tokens[~accepted]) == {0}


def test_drafts_are_judged_by_the_law_they_were_drawn_from():
    tokens, accepted, _, q = one_step([0.5, 0.5, 1e-30], [0.5, 0.3, 0.2], filters=Law(top_k=2))
    np.testing.assert_allclose(q, [0.625, 0.375, 0], atol=1e-6)
    np.testing.assert_allclose(shares(tokens, 3), [0.5, 0.5, 0], atol=0.005)
    assert accepted.mean() == pytest.approx(0.875, abs=0.005)


def test_acceptance_depends_on_the_seed_and_only_on_it():
    first, again, other = (one_step([0.5, 0.5], [0.9, 0.1], seed=s, draws=10_000) for s in (0, 0, 1))
    for result in (first, other):
        assert result[1].mean() == pytest.approx(0.6, abs=0.015)
    np.testing.assert_array_equal(first[1], again[1])
    np.testing.assert_array_equal(first[0], again[0])
    assert (first[1] != other[1]).mean() > 0.3


def test_equal_laws_always_accept_and_never_give_nan():
    p = np.array([0.6, 0.3, 0.1, 1e-9])
    _, accepted, verdict, _ = one_step(p / p.sum(), p / p.sum(), draws=50_000)
    assert accepted.all() and np.isfinite(np.asarray(verdict.log_probs)[:, 0]).all()
    # A rejection although nothing is left over (q exceeds p everywhere by rounding): the draw is from p.
    keys = request_keys(20_000)
    target = jnp.tile(jnp.log(jnp.array([0.7, 0.3])), (20_000, 2, 1))
    log_q = jnp.full((20_000, 1, 2), 5.0)
    verdict = rejection(
        target,
        jnp.zeros((20_000, 1), jnp.int32),
        jnp.ones(20_000, jnp.int32),
        jnp.ones(20_000),
        keys,
        jnp.tile(jnp.arange(2), (20_000, 1)),
        law=Law(),
        log_q=log_q,
    )
    fell = np.asarray(verdict.count) == 1
    assert fell.mean() > 0.98 and np.isfinite(np.asarray(verdict.log_probs)[fell, 0]).all()
    np.testing.assert_allclose(shares(np.asarray(verdict.tokens)[fell, 0], 2), [0.7, 0.3], atol=0.015)


def test_a_deterministic_draft_is_a_one_hot_law():
    draws, p = DRAWS, np.array([0.6, 0.3, 0.1])
    verdict = rejection(
        jnp.tile(jnp.log(jnp.asarray(p)), (draws, 2, 1)),
        jnp.ones((draws, 1), jnp.int32),
        jnp.ones(draws, jnp.int32),
        jnp.ones(draws),
        request_keys(draws),
        jnp.tile(jnp.arange(2), (draws, 1)),
        law=Law(),
    )
    tokens, accepted = np.asarray(verdict.tokens)[:, 0], np.asarray(verdict.count) == 2
    np.testing.assert_allclose(shares(tokens, 3), p, atol=0.005)
    assert accepted.mean() == pytest.approx(0.3, abs=0.005) and set(tokens[~accepted]) == {0, 2}
    np.testing.assert_allclose(shares(np.asarray(verdict.tokens)[accepted, 1], 3), p, atol=0.01)


@pytest.mark.parametrize("method", verify.METHODS)
@pytest.mark.parametrize("with_law", [True, False])
def test_log_probs_are_the_targets_for_every_kind_of_token(method, with_law):
    rows, count, vocab = 300, 4, 9
    logits = jax.random.normal(jax.random.key(0), (rows, count, vocab)) * 2
    temperature = jnp.array([0.0, 0.7, 1.0] * (rows // 3))
    keys, positions = request_keys(rows), jnp.tile(jnp.arange(count) + 5, (rows, 1))
    filters = Law(valid_vocab=7)
    draw = jitted_draw("rejection", temperature, keys, filters)
    drafts, log_q = draw(jnp.roll(logits[:, :-1], 1, 0) * 0.2 + logits[:, :-1], positions[:, :-1])
    arguments = (logits, drafts, jnp.full(rows, 3), temperature, keys, positions)
    if method == "coupled":
        verdict = coupled(*arguments, law=filters)
    else:
        verdict = rejection(*arguments, law=filters, log_q=log_q if with_law else None)
    assert len(np.unique(verdict.count)) == 4
    expected = log_law(logits, jnp.tile(temperature[:, None], (1, count)), filters)
    expected = np.take_along_axis(np.asarray(expected), np.asarray(verdict.tokens)[..., None], -1)[..., 0]
    committed = np.arange(count) < np.asarray(verdict.count)[:, None]
    np.testing.assert_allclose(np.asarray(verdict.log_probs)[committed], expected[committed], atol=1e-5)
    assert int(np.asarray(verdict.tokens)[committed].max()) < 7
    hot = committed & (np.asarray(temperature) > 0)[:, None]
    assert (np.asarray(verdict.log_probs)[hot] < 0).all()


def test_coupled_gives_the_targets_own_tokens_whatever_was_drafted():
    rows, count, vocab = 40, 5, 30
    logits = jax.random.normal(jax.random.key(1), (rows, count, vocab))
    keys, positions = request_keys(rows), jnp.tile(jnp.arange(count) + 11, (rows, 1))
    plain = coupled(logits, jnp.zeros((rows, count - 1), jnp.int32), jnp.zeros(rows, jnp.int32), jnp.ones(rows), keys, positions,
                    law=Law())  # fmt: skip
    assert (plain.count == 1).all()
    own = plain.tokens[:, :-1]
    for wrong_at in range(count):
        drafts = own.at[:, wrong_at].add(1) % vocab if wrong_at < count - 1 else own
        verdict = coupled(logits, drafts, jnp.full(rows, count - 1), jnp.ones(rows), keys, positions, law=Law())
        np.testing.assert_array_equal(verdict.tokens, plain.tokens)
        np.testing.assert_array_equal(verdict.count, wrong_at + 1)


def test_accepted_tokens_count_up_to_the_first_miss():
    own = coupled(
        jnp.zeros((1, 5, 50)), jnp.zeros((1, 4), jnp.int32), jnp.zeros(1, jnp.int32), jnp.ones(1), request_keys(1),
        jnp.arange(5)[None], law=Law(),
    ).tokens  # fmt: skip
    drafts = own[:, :-1] + jnp.array([[0, 1, 0, 1]])  # matches: 1, 0, 1, 0
    verdict = coupled(
        jnp.zeros((1, 5, 50)), drafts, jnp.array([4]), jnp.ones(1), request_keys(1), jnp.arange(5)[None], law=Law()
    )
    assert verdict.count[0] == 2


@pytest.mark.parametrize("method", verify.METHODS)
def test_rows_are_independent_and_counts_are_per_row(method):
    run = coupled if method == "coupled" else rejection
    logits = jnp.tile(jnp.array([3.0, 0.0, 1.0]), (3, 4, 1))
    drafts, counts = jnp.zeros((3, 3), jnp.int32), jnp.array([3, 0, 2])
    temperature, keys = jnp.array([1.0, 0.5, 0.0]), request_keys(3)
    positions = jnp.array([[9, 10, 11, 12], [2, 3, 4, 5], [40, 41, 42, 43]])
    batch = run(logits, drafts, counts, temperature, keys, positions, law=Law())
    assert batch.count[1] == 1 and batch.count[2] == 3 and 1 <= batch.count[0] <= 4
    for order in ([0], [1], [2], [2, 0, 1]):
        at = jnp.array(order)
        part = run(logits[at], drafts[at], counts[at], temperature[at], keys[at], positions[at], law=Law())
        np.testing.assert_array_equal(part.count, batch.count[at])
        for b, row in enumerate(order):
            n = int(batch.count[row])
            np.testing.assert_array_equal(part.tokens[b, :n], batch.tokens[row, :n])
            np.testing.assert_allclose(part.log_probs[b, :n], batch.log_probs[row, :n], atol=1e-6)


@pytest.mark.parametrize("method", verify.METHODS)
def test_temperature_zero_is_greedy_decoding(method):
    rows, depth, vocab = 64, 3, 6
    logits = jax.random.normal(jax.random.key(4), (rows, depth + 1, vocab))
    greedy = jnp.argmax(logits, -1)
    keys, positions = request_keys(rows), jnp.tile(jnp.arange(depth + 1), (rows, 1))
    draw = jitted_draw(method, jnp.zeros(rows), keys, Law())
    drafts, log_q = draw(logits[:, :-1] + jax.random.normal(jax.random.key(5), (rows, depth, vocab)) * 0.5, positions[:, :-1])
    arguments = (logits, drafts, jnp.full(rows, depth), jnp.zeros(rows), keys, positions)
    verdict = coupled(*arguments, law=Law()) if method == "coupled" else rejection(*arguments, law=Law(), log_q=log_q)
    agreed = np.cumprod(np.asarray(drafts == greedy[:, :-1]), axis=1).sum(1)
    np.testing.assert_array_equal(verdict.count, agreed + 1)
    committed = np.arange(depth + 1) < agreed[:, None] + 1
    np.testing.assert_array_equal(np.asarray(verdict.tokens)[committed], np.asarray(greedy)[committed])
    assert (np.asarray(verdict.log_probs)[committed] == 0).all()


@pytest.mark.parametrize("depth, vocab", [(0, 5), (1, 17), (2, 5), (8, 17)])
def test_every_shape_stays_in_bounds(depth, vocab):
    rows = 16
    logits = jax.random.normal(jax.random.key(depth), (rows, depth + 1, vocab))
    keys, positions = request_keys(rows), jnp.tile(jnp.arange(depth + 1), (rows, 1))
    drafts = jnp.full((rows, depth), vocab - 1)
    for run in (coupled, rejection):
        verdict = run(logits, drafts, jnp.full(rows, depth), jnp.ones(rows), keys, positions, law=Law())
        assert verdict.tokens.shape == verdict.log_probs.shape == (rows, depth + 1)
        assert ((verdict.count >= 1) & (verdict.count <= depth + 1)).all()
        committed = np.arange(depth + 1) < np.asarray(verdict.count)[:, None]
        kept = np.asarray(verdict.tokens)[committed]
        assert ((kept >= 0) & (kept < vocab)).all() and np.isfinite(np.asarray(verdict.log_probs)[committed]).all()


def test_the_coupled_drafter_draws_with_the_targets_noise():
    keys, logits = request_keys(4), jax.random.normal(jax.random.key(0), (4, 1, 20))
    draw = jitted_draw("coupled", jnp.ones(4), keys, Law())
    ids, log_q = draw(logits, jnp.full((4, 1), 7))
    target = coupled(
        logits, jnp.zeros((4, 0), jnp.int32), jnp.zeros(4, jnp.int32), jnp.ones(4), keys, jnp.full((4, 1), 7), law=Law()
    )
    assert log_q is None
    np.testing.assert_array_equal(ids, target.tokens)
    noise_row = noise.gumbel(noise.position_keys(keys, jnp.full((4, 1), 7), Role.TARGET), 20)
    np.testing.assert_array_equal(ids, jnp.argmax(logits + noise_row, -1))


def test_unknown_methods_are_refused():
    with pytest.raises(ValueError, match=r"typical.*coupled, rejection"):
        verify.make_draw("typical", jnp.ones(1), request_keys(1), Law())


STOP = 99


def truncate(tokens, budget, ignore=False, count=None, ends=(STOP,)):
    tokens = jnp.array([tokens])
    count = tokens.shape[1] if count is None else count
    verdict = verify.Verdict(tokens, jnp.zeros(tokens.shape), jnp.array([count]))
    kept, reason = jax.jit(verify.truncate, static_argnums=1)(verdict, ends, jnp.array([budget]), jnp.array([ignore]))
    return int(kept[0]), FinishReason(int(reason[0]))


def test_stop_comes_first_then_the_cap():
    block = [10, 11, STOP, 20, 21, 22]
    assert truncate(block, 5) == (3, FinishReason.STOP)
    assert truncate(block, 3) == (3, FinishReason.STOP)
    assert truncate(block, 2) == (2, FinishReason.LENGTH)
    assert truncate(block, 50) == (3, FinishReason.STOP)
    assert truncate(block, 5, ignore=True) == (5, FinishReason.LENGTH)
    assert truncate(block, 50, ignore=True) == (6, FinishReason.RUNNING)
    assert truncate(block, 50, count=2) == (2, FinishReason.RUNNING)  # the end token was drafted and fell
    assert truncate(block, 0) == (0, FinishReason.LENGTH)


@pytest.mark.parametrize("place", range(5))
def test_an_end_token_at_every_place(place):
    block = [1, 2, 3, 4, 5]
    block[place] = STOP
    for budget in range(1, 8):
        expected = (place + 1, FinishReason.STOP)
        if budget <= place:
            expected = (budget, FinishReason.LENGTH)
        assert truncate(block, budget) == expected
    assert truncate(block, 9, ends=()) == (5, FinishReason.RUNNING)
    assert truncate(block, 9, ends=(7, STOP)) == (place + 1, FinishReason.STOP)
