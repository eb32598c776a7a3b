from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.bandit import simulate
from adrl_jax.bandit.base import Bandit
from adrl_jax.bandit.fixed import fixed
from adrl_jax.speculation.strategy import OFF, Strategy

ARMS = (OFF, Strategy("eagle", 2), Strategy("ngram", 4))
BATCHES = (1, 2, 4, 8)
SECONDS = np.asarray([[0.01 + 0.002 * b * s.verify_tokens for s in ARMS] for b in BATCHES])  # [B, A]
CHANCE = {"eagle": 0.7, "ngram": 0.4}


def world(**changes):
    chances = np.asarray([[CHANCE["eagle"]] * 4, [CHANCE["ngram"]] * 4])
    plain = simulate.World(
        seconds=jnp.asarray(np.stack([SECONDS, 2 * SECONDS], axis=1), jnp.float32),
        batches=jnp.asarray(BATCHES, jnp.int32),
        caches=jnp.asarray([64, 10**6], jnp.int32),
        logit=jnp.asarray(np.log(chances / (1 - chances)), jnp.float32),
        drop=jnp.zeros(2),
        recovery=jnp.float32(10.0),
        shock_at=jnp.asarray([10**6], jnp.int32),
        shock=jnp.zeros((2, 2)),
        spread=jnp.float32(0.0),
        lengths=jnp.asarray([40.0, 1.0, 300.0]),
        prompt=jnp.float32(100.0),
        noise=jnp.asarray([0.0, 0.0, 1.0, 0.0]),
        weather=jnp.float32(30.0),
    )
    return plain._replace(**{name: jnp.asarray(value, plain._asdict()[name].dtype) for name, value in changes.items()})


def rates(world_chances=CHANCE):
    """Tokens a row and second of every arm at every batch size, float64."""
    tokens = [sum(world_chances.get(s.drafter, 0.0) ** d for d in range(s.depth + 1)) for s in ARMS]
    return np.asarray(tokens) / (2 * SECONDS)


def play(bandit, w, decisions=120, seed=0, requests=8):
    run = jax.jit(lambda w, k: simulate.run(bandit, ARMS, w, k, decisions=decisions, requests=requests))
    return jax.tree.map(np.asarray, run(w, jax.random.key(seed)))


class Tally(NamedTuple):
    """What a bandit was told, summed."""

    examined: jax.Array
    accepted: jax.Array
    tokens: jax.Array
    passes: jax.Array
    seconds: jax.Array
    square: jax.Array
    launches: jax.Array


def tallying(arm):
    """Runs one arm and adds up its reports; returns a bandit whose trace is not of interest, and its final state."""
    zeros = jnp.zeros(4)

    def update(state, r):
        log = jnp.log(r.seconds / r.rounds)
        return Tally(
            state.examined + r.examined,
            state.accepted + r.accepted,
            state.tokens + r.tokens,
            state.passes + r.tokens - r.accepted.sum(),
            state.seconds + log,
            state.square + log**2,
            state.launches + 1,
        )

    return Bandit(lambda: Tally(zeros, zeros, *(jnp.zeros(()) for _ in range(5))), lambda s, k, c: jnp.int32(arm), update)


def final(bandit, w, decisions=400, requests=8):
    """The state after a run: `run` hides it, so it is smuggled out through a trace of states."""
    kept = []

    def update(state, report):
        state = bandit.update(state, report)
        jax.debug.callback(lambda s: kept.append(jax.tree.map(np.asarray, s)), state, ordered=True)
        return state

    play(Bandit(bandit.init, bandit.select, update), w, decisions, requests=requests)
    jax.effects_barrier()
    return kept[-1]


@pytest.mark.parametrize("arm", range(3))
def test_regret_of_a_fixed_arm_in_closed_form(arm):
    trace = play(fixed(arm, 3), world())
    bucket = np.searchsorted(BATCHES, trace.running)
    ratio = (rates()[:, arm] / rates().max(1))[bucket]
    np.testing.assert_allclose(trace.ratio, ratio, rtol=1e-5)
    np.testing.assert_array_equal(trace.best, rates().argmax(1)[bucket])
    rounds = trace.seconds / (2 * SECONDS[bucket, arm])
    np.testing.assert_allclose(rounds, np.round(rounds), rtol=1e-4)
    lost, total = simulate.regret(trace)
    np.testing.assert_allclose(lost, (trace.seconds * (1 - ratio)).sum(), rtol=1e-5)
    np.testing.assert_allclose(lost + total, trace.seconds.sum(), rtol=1e-6)


def test_who_knows_the_table_has_no_regret():
    best = jnp.asarray(rates().argmax(1))
    oracle = Bandit(
        lambda: jnp.zeros(()), lambda s, k, c: best[jnp.searchsorted(jnp.asarray(BATCHES), c.batch)], lambda s, r: s
    )
    assert simulate.regret(play(oracle, world()))[0] == pytest.approx(0, abs=1e-4)


def test_a_rollout_shrinks_and_the_next_starts_full():
    trace = play(fixed(1, 3), world(), decisions=300)
    first = np.flatnonzero(np.diff(trace.rollout, prepend=-1))
    assert len(first) > 3 and (trace.running[first] == 8).all()
    later = np.setdiff1d(np.arange(300), first)
    assert (trace.running[later] <= trace.running[later - 1]).all() and (trace.running >= 1).all()
    assert len(set(trace.running.tolist())) > 4, "long tails leave small batches"


def test_all_controllers_meet_the_same_requests():
    """The tokens of a rollout do not depend on the arms; launches with deep drafts need fewer rounds for them."""
    ends = {}
    for arm in (0, 1):
        trace = play(fixed(arm, 3), world(), decisions=500)
        rows = [trace.running[trace.rollout == r] for r in range(4)]
        ends[arm] = [len(r) for r in rows]
        plain_rounds = [np.ceil(300 / 8)] * 4
        assert all(n <= p + 1 for n, p in zip(ends[arm], plain_rounds))
    assert all(a > b for a, b in zip(ends[0], ends[1]))

    def length_sum(arm):
        told = final(tallying(arm), world(lengths=[64.0, 0.0, 64.0]), decisions=8 if arm == 0 else 40)
        return float(told.tokens)

    assert length_sum(0) == 8 * 64, "8 plain launches of 8 rounds are one rollout of 64 tokens"


def test_drafts_stand_as_often_as_they_should():
    told = final(tallying(2), world(), decisions=600)
    assert told.examined[0] == pytest.approx(told.passes, rel=0.02), "but for drafts past the end of a response"
    for depth in range(4):
        n, p = told.examined[depth], CHANCE["ngram"]
        assert abs(told.accepted[depth] - n * p) < 5 * np.sqrt(n * p * (1 - p)), depth
    np.testing.assert_allclose(told.examined[1:], told.accepted[:-1])
    plain = final(tallying(0), world(), decisions=50)
    assert plain.examined.sum() == 0 and plain.accepted.sum() == 0


def test_noise_has_the_asked_for_size_and_outliers():
    for noise, deviation in (([0.1, 0, 1, 0], 0.1), ([0, 0, 1, 0.2], 0.2)):
        w = world(noise=noise, lengths=[64.0, 0.0, 64.0])._replace(weather=jnp.float32(5.0))
        told = final(tallying(0), w, decisions=1600)
        spread = np.sqrt(told.square / told.launches - (told.seconds / told.launches) ** 2)
        assert deviation * 0.8 < spread < deviation * 1.25, noise
    told = final(tallying(0), world(noise=[0, 0.25, 4.0, 0], lengths=[64.0, 0.0, 64.0]), decisions=1600)
    extra = told.seconds / told.launches - np.log(2 * SECONDS[3, 0])
    assert extra == pytest.approx(0.25 * np.log(4) / 2, rel=0.2), "log-uniform up to the factor in a quarter of the launches"


def test_updates_drop_acceptance_and_time_restores_it():
    """With every response 16 tokens long a plain rollout is 2 launches; eagle falls by 2, and halves it each launch."""
    w = world(drop=[2.0, 0.0], recovery=1 / np.log(2), lengths=[16.0, 0.0, 16.0])
    trace = play(fixed(0, 3), w, decisions=12)
    behind, want = 0.0, []
    for i in range(12):
        behind += 2.0 * (i % 2 == 0)
        odds = np.log(0.7 / 0.3) - behind
        r = rates({"eagle": 1 / (1 + np.exp(-odds)), "ngram": 0.4})[3]
        want.append(r[0] / r.max())
        behind /= 2
    np.testing.assert_allclose(trace.ratio, want, rtol=1e-5)


def test_shocks_come_when_they_are_due():
    w = world(shock_at=[30], shock=[[0.0, 0.0], [-9.0, 9.0]], lengths=[300.0, 0.0, 300.0])
    trace = play(fixed(0, 3), w, decisions=37, requests=8)
    assert (trace.best[:30] == rates().argmax(1)[3]).all()
    assert (trace.best[30:] == 2).all()


def test_seeds_differ_and_can_be_mapped():
    bandit, w = fixed(1, 3), world(spread=0.5)
    keys = jax.random.split(jax.random.key(0), 3)
    many = jax.jit(jax.vmap(lambda k: simulate.run(bandit, ARMS, w, k, decisions=40, requests=8)))(keys)
    one = jax.jit(lambda k: simulate.run(bandit, ARMS, w, k, decisions=40, requests=8))(keys[1])
    np.testing.assert_allclose(many.ratio[1], one.ratio, rtol=1e-4)
    assert not np.array_equal(many.running[0], many.running[1])
    lost, total = simulate.regret(many)
    assert lost.shape == total.shape == (3,)


def trace_of(ratio, seconds=None):
    ratio = np.asarray(ratio, np.float32)
    zeros = np.zeros(ratio.shape, np.int32)
    return simulate.Trace(zeros, zeros, zeros, np.ones_like(ratio) if seconds is None else seconds, ratio, zeros)


def test_recovery_counts_from_the_change_to_the_first_good_window():
    lagging = [1.0] * 10 + [0.5] * 7 + [1.0] * 40
    # A window of 20 may hold two launches at half speed: (18 + 2 * 0.5) / 20 = 0.95.
    assert simulate.recovery(trace_of(lagging), at=10) == 5
    assert simulate.recovery(trace_of([1.0] * 40), at=5) == 0
    assert simulate.recovery(trace_of([0.9] * 40), at=5) == 35, "never: all there were"
    both = simulate.recovery(trace_of([lagging, [0.94] * 57]), at=10)
    assert both.tolist() == [5, 47]


def test_recovery_weighs_launches_by_their_seconds():
    ratio = np.asarray([0.5] * 2 + [1.0] * 38)
    seconds = np.where(ratio < 1, 10.0, 1.0)
    assert simulate.recovery(trace_of(ratio, seconds), at=0) == 2


def test_recovery_needs_a_whole_window():
    with pytest.raises(ValueError, match="fewer than window=20"):
        simulate.recovery(trace_of([1.0] * 30), at=15)
