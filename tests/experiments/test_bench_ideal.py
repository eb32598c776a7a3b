"""The ideal of a rollout against sums by hand."""

import dataclasses

import numpy as np
import pytest

from adrl_jax.rollout.stats import LaunchRecord
from adrl_jax.speculation.strategy import OFF, Strategy
from experiments.bench import bandit, ideal

ARMS = (OFF, Strategy("eagle", 1), Strategy("eagle", 3))
TABLE = {(0, 1, 64): 1.0, (0, 4, 64): 2.0, (1, 1, 64): 1.2, (1, 4, 64): 4.0, (2, 1, 64): 1.5, (0, 1, 128): 1.1, (2, 4, 64): 9.0}
CHANCES = {"eagle": np.array([0.5, 0.5, 0.5])}


def test_each_stretch_takes_its_best_arm():
    plain = ideal.seconds([2, 2, 2, 10], 8, ARMS, TABLE, CHANCES, (1, 4), allowed=[0])
    assert plain == pytest.approx(2 * 2.0 + 8 * 1.0)
    best = ideal.seconds([2, 2, 2, 10], 8, ARMS, TABLE, CHANCES, (1, 4))
    assert best == pytest.approx(2 * 2.0 + 8 / max(1.5 / 1.2, 1.875 / 1.5))
    assert ideal.seconds([100], 20, ARMS, TABLE, CHANCES, (1, 4), allowed=[0]) == pytest.approx(100 * 1.1)
    with pytest.raises(ValueError, match="no latency is known at batch=4"):
        ideal.seconds([1, 1], 0, ARMS, {(0, 1, 64): 1.0}, CHANCES, (1, 4))


def record(arm, rounds, seconds, examined=(), accepted=(), compiled=False, catch_up=0.0):
    return LaunchRecord(arm, 1, 1, 64, rounds, 1, seconds, 0.0, compiled, 0, 0, examined, accepted, 0, catch_up)


def test_tables_are_read_off_launches():
    launches = [record(0, 4, 4.0), record(0, 4, 40.0, compiled=True), record(0, 2, 2.4), record(0, 1, 9.0)]
    launches += [record(1, 2, 5.0, (4,), (3,), catch_up=1.0), record(2, 2, 6.0, (4, 3, 1), (3, 1, 0))]
    assert ideal.latencies(launches) == pytest.approx({(0, 1, 64): 1.2, (1, 1, 64): 2.0, (2, 1, 64): 3.0})
    np.testing.assert_allclose(ideal.acceptance(launches, ARMS)["eagle"], [6 / 8, 1 / 3, 0])
    assert ideal.expected_tokens(ARMS[2], ideal.acceptance(launches, ARMS)) == pytest.approx(1 + 0.75 + 0.25)
    shallow = ideal.acceptance(launches[:5], ARMS)["eagle"]
    np.testing.assert_allclose(shallow, 0.75)  # deeper ones were never looked at


def test_of_shared_slots_a_draft_without_one_did_not_stand():
    arms = (OFF, Strategy("eagle", 3, 1, 2), Strategy("eagle", 3))
    shared = dataclasses.replace(record(1, 2, 5.0, (6, 5, 2), (5, 3, 1)), accept_passes=8)
    chances = ideal.acceptance([shared, record(2, 2, 6.0, (4, 3, 1), (3, 1, 0))], arms)
    np.testing.assert_allclose(chances["eagle-v2"], [5 / 8, 3 / 5, 1 / 3])
    np.testing.assert_allclose(chances["eagle"], [3 / 4, 1 / 3, 0])
    assert ideal.expected_tokens(arms[1], chances) == pytest.approx(1 + (5 + 3 + 1) / 8)


def test_the_accept_length_that_a_speed_up_needs():
    def ideal_of(chance):
        return 10 / (1 + chance + chance**2)  # depth 2 at no cost

    needed = ideal.accept_length_needed(2.0, 10.0, ideal_of, 2)
    assert needed == pytest.approx(2.0, abs=1e-6)
    assert ideal.accept_length_needed(3.5, 10.0, ideal_of, 2) is None


def test_a_recorded_table_is_one_that_the_simulator_reads(tmp_path):
    def at(batch, *args):
        return dataclasses.replace(record(*args), batch_bucket=batch, running=batch)

    launches = [
        at(b, arm, 2, 0.5 * b + arm, (6, 4, 3)[: ARMS[arm].depth], (4, 3, 1)[: ARMS[arm].depth])
        for b in (1, 4)
        for arm in range(3)
    ]
    launches.append(at(8, 0, 1, 1.0))  # one arm alone: left out
    path = tmp_path / "here.json"
    ideal.write_table(path, launches, ARMS, source="a test", world={"requests": 3, "rounds_per_launch": 2})
    table = bandit.read_table(path)
    assert (table.name, table.batch_buckets, table.requests, table.rounds) == ("here", (1, 4), 3, 2)
    assert table.strategies == ARMS
    np.testing.assert_allclose(table.world.seconds[:, 0], [[0.25, 0.75, 1.25], [1.0, 1.5, 2.0]])
    chances = 1 / (1 + np.exp(-table.world.logit[0]))
    np.testing.assert_allclose(chances, [16 / 24, 3 / 4, 1 / 3], atol=1e-4)
    with pytest.raises(ValueError, match="batch of 9"):
        ideal.write_table(path, launches, ARMS, source="a test", world={"requests": 9})
