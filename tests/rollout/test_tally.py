"""Which drafts were looked at and which stood, and what becomes of drafts that are not numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_world import DRAFTERS, EOS, SEED, TARGET, VALID, make_requests

from adrl_jax.bandit.fixed import fixed
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.rollout.round import tally
from adrl_jax.rollout.stats import report_of
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import SamplingParams


def test_a_pass_is_counted_row_by_row():
    accepted, offered = jnp.array([0, 2, 3, 1, 0]), jnp.array([3, 3, 3, 1, 0])
    running, bad = jnp.array([True, True, True, True, False]), jnp.array([False, True, False, False, True])
    counts = tally(accepted, offered, running, bad, 3)
    # Row 0 looks at one draft, row 1 at all three and refuses the last, row 3 had one only, row 4 does not run.
    np.testing.assert_array_equal(counts.examined, [4, 2, 2])
    np.testing.assert_array_equal(counts.accepted, [3, 2, 1])
    assert int(counts.faults) == 1


def engine_with(world, drafter_params, **settings):
    names = dict(seed=SEED, eos_ids=EOS, valid_vocab=VALID, max_batch=10, batch_buckets=(10,), cache_bucket=128)
    config = EngineConfig(strategies=(OFF, Strategy("eagle", 3)), **(names | settings))
    engine = Engine(TARGET, config, {"eagle": DRAFTERS["eagle"]})
    engine.publish(world.params, 3, {"eagle": drafter_params})
    return engine


def run(engine, arm, **request):
    return engine.generate(make_requests(**request), SamplingParams(), fixed(arm, 2), fixed(arm, 2).init())


def test_counts_add_up_to_the_accept_length(world):
    result = run(engine_with(world, world.drafter_params["eagle"]), 1, forced=True, budgets=(40,) * 5)
    launches = result.stats.launches
    examined = np.sum([x.examined for x in launches], axis=0)
    accepted = np.sum([x.accepted for x in launches], axis=0)
    # Every pass looks at a first draft, but the first ones of the two prompts of one token: no hidden state is known there.
    assert examined[0] == result.stats.accept_passes - 2
    assert examined[1] == accepted[0] and examined[2] == accepted[1]  # and at the next where the one before stood
    # What budgets cut off was accepted all the same.
    assert accepted.sum() + result.stats.accept_passes >= sum(x.accept_tokens for x in launches)
    report = report_of(launches[0], 5)
    assert report.examined.shape == (5,) and not report.examined[3:].any() and report.rounds == launches[0].rounds


def test_a_drafter_without_numbers_costs_speed_only(world):
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), world.drafter_params["eagle"])
    engine = engine_with(world, broken)
    plain, faulty = run(engine, 0), run(engine, 1)
    for a, b in zip(plain.rollouts, faulty.rollouts, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
    stats = faulty.stats
    assert stats.faults == stats.accept_passes - 2 > 0 and plain.stats.faults == 0  # none of the prompts of one token
    assert stats.accept_length == 1.0
    rejection = run(engine_with(world, broken, verification="rejection"), 1)
    assert all(np.isfinite(r.log_probs).all() for r in rejection.rollouts) and rejection.stats.accept_length == 1.0


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_simulated_acceptance_is_geometric(world, acceptance):
    engine = engine_with(world, world.drafter_params["eagle"], simulate_acceptance=acceptance)
    launches = run(engine, 1, forced=True, samples=2, budgets=(200,) * 5, longest=20).stats.launches
    examined = np.sum([x.examined for x in launches], axis=0)
    accepted = np.sum([x.accepted for x in launches], axis=0)
    error = 4 * np.sqrt(np.maximum(examined, 1) * acceptance * (1 - acceptance))
    assert np.all(np.abs(accepted - acceptance * examined) <= error)
