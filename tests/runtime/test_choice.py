"""Correct or refresh: for a whole batch, from its lag and from earlier batches, and from nothing else."""

import inspect

import pytest

from adrl_jax.runtime.choice import CHOICES, Known, RefreshConfig, decide


def test_off_and_always_look_at_the_lag_only():
    for known in (Known(), Known(0.5, 9.0, 1.0)):
        assert not any(decide(RefreshConfig("off"), known, lag) for lag in range(5))
        assert [decide(RefreshConfig("always", lag=2), known, lag) for lag in range(4)] == [False, False, True, True]


def test_auto_waits_for_evidence_then_compares_disagreement_and_cost():
    auto = RefreshConfig("auto", above=0.1, cost=0.8)
    assert not decide(auto, Known(), 8)  # nothing known: corrected
    known = Known(disagreement=0.03)
    assert [decide(auto, known, lag) for lag in (1, 3, 4, 8)] == [False, False, True, True]
    assert decide(auto, known.learn(refresh_s=0.7, generate_s=1.0), 4)
    assert not decide(auto, known.learn(refresh_s=0.9, generate_s=1.0), 4)


def test_means_run_and_the_first_value_counts_in_full():
    known = Known().learn(disagreement=0.5)
    assert known == Known(0.5) and known.learn(refresh_s=2.0).refresh_s == 2.0
    assert known.learn(disagreement=0.0).disagreement == pytest.approx(0.4)
    assert Known(**known._asdict()) == known  # as JSON keeps it


def test_a_decision_cannot_see_the_batch():
    """Its arguments are numbers of earlier batches and the lag; there is no way to hand it a rollout."""
    assert list(inspect.signature(decide).parameters) == ["config", "known", "lag"]
    assert set(Known._fields) == {"disagreement", "refresh_s", "generate_s"}


@pytest.mark.parametrize("bad", [{"choice": "sometimes"}, {"lag": 0}])
def test_bad_settings(bad):
    with pytest.raises(ValueError, match=f"choose one of {', '.join(CHOICES)}|must be >= 1"):
        RefreshConfig(**bad)
