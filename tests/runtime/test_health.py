"""Runs that go wrong: updates that are not finite, and metrics past their published bounds."""

import logging

import jax.numpy as jnp
import pytest

from adrl_jax.learner import alerts
from adrl_jax.runtime.health import Health, UpdateError


def values(bad):
    return {"loss": jnp.float32("nan" if bad else 1.0), "grad_norm": jnp.float32(1.0), "nonfinite": jnp.float32(bad)}


def test_a_run_ends_after_too_many_bad_updates_in_a_row_and_not_before():
    health = Health(2)
    step = lambda learner, bad: (learner + 1, values(bad))  # noqa: E731
    learner, found = health.apply(step, 0, [True, True, False, True])
    assert learner == 4 and [v["nonfinite"] for v in found] == [1, 1, 0, 1]
    health.apply(step, 0, [True])
    with pytest.raises(UpdateError, match=r"3 updates in a row \(learner.max_nonfinite=2\); the last had loss nan"):
        health.apply(step, 0, [True])


def test_one_line_when_a_bound_is_crossed_and_again_only_after_it_came_back(caplog):
    logging.getLogger("adrl_jax").propagate = True
    health = Health(1)
    fine = {"ratio/mean": 1.0, "mismatch/ess": 0.9, "mismatch/k1": 0.0}
    with caplog.at_level("WARNING", "adrl_jax"):
        for row in (fine, fine | {"mismatch/ess": 0.1}, fine | {"mismatch/ess": 0.2}, fine, fine | {"mismatch/ess": 0.2}):
            health.watch(row)
    assert [r.message for r in caplog.records] == [
        "mismatch/ess is 0.1, below 0.3: few tokens carry the batch",
        "mismatch/ess is 0.2, below 0.3: few tokens carry the batch",
    ]


@pytest.mark.parametrize("name", alerts.BOUNDS)
def test_every_bound_can_be_crossed_and_kept(name):
    low, high, _ = alerts.BOUNDS[name]
    inside = low if high == float("inf") else (low + high) / 2
    assert alerts.crossed({name: inside}) == {}
    outside = low - 0.1 if high == float("inf") else high + 0.1
    assert list(alerts.crossed({name: outside})) == [name]
