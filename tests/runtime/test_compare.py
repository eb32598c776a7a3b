"""The closing comparison, on an engine whose answers and speeds are scripted."""

import types

import numpy as np
import pytest

from adrl_jax.bandit.base import Context
from adrl_jax.bandit.fixed import fixed
from adrl_jax.metrics import CompileClock
from adrl_jax.runtime import compare
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import FinishReason, Rollout, SamplingParams

STRATEGIES = (OFF, Strategy("ngram", 2))


def rollout(ids, passes=0, tokens=0):
    n = len(ids)
    return Rollout(
        0, 0, 0, 0, np.array([7, *ids], np.int32), 1, n, np.zeros(n, np.float32), np.zeros(n, np.int32), FinishReason.STOP,
        SamplingParams(), passes, tokens,
    )  # fmt: skip


class Engine:
    """Plain decoding takes twice as long; `spoil` changes what speculation returns."""

    def __init__(self, verification="coupled", spoil=False):
        self.config = types.SimpleNamespace(verification=verification, seed=0, valid_vocab=None)
        self.spoil = spoil

    def generate(self, requests, sampling, bandit, state, *, on_launch=None):
        import time

        arm = int(bandit.select(state, None, Context(1, 1, 64)))
        time.sleep(0.02 if arm else 0.04)
        ids = [1, 2, 3, 4] if not (arm and self.spoil) else [1, 2, 3]
        launch = types.SimpleNamespace(arm=arm, running=1, start=0.5, seconds=0.25)
        stats = types.SimpleNamespace(launches=(launch,))
        found = rollout(ids, passes=2 * arm, tokens=len(ids) * arm)
        return types.SimpleNamespace(rollouts=[found], bandit_state=state, stats=stats)


def compared(engine, repeats=3):
    bandit = fixed(1, 2)
    parts = types.SimpleNamespace(engine=engine, bandit=bandit, strategies=STRATEGIES, off=0, model_config=None)
    runs = []
    result = compare.speculation(
        parts, None, [object()], SamplingParams(), bandit.init(), CompileClock(), repeats=repeats, on_run=lambda: runs.append(1)
    )
    assert len(runs) == 2 * (repeats + 1)
    return result


def test_speed_up_is_the_ratio_of_medians_and_equal_ids_are_identical():
    result = compared(Engine())
    assert 1.5 < result.speedup < 2.5 and len(result.seconds_on) == len(result.seconds_off) == 3
    assert result.identical is True and result.divergences == 0 and result.accept_length == pytest.approx(2.0)
    assert result.tokens == 4 and result.running == ((0.0, 1), (0.25, 0))
    assert result.details()["rollout_tokens_per_s"] == pytest.approx(4 / sorted(result.seconds_on)[1])


def test_a_response_that_differs_is_counted():
    result = compared(Engine(spoil=True), repeats=1)
    assert result.identical is False and result.divergences == 1 and result.ties == 0


def test_rejection_promises_the_law_and_not_the_tokens():
    result = compared(Engine("rejection", spoil=True), repeats=1)
    assert result.identical is None and result.divergences is None


def test_running_over_time_of_nothing():
    assert compare.running_over_time([]) == ()
