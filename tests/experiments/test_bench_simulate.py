"""The schedule model against closed forms, and the properties that every schedule has."""

import numpy as np
import pytest

from experiments.bench.runtime import overlap_bound
from experiments.bench.schedule import lengths, plan
from experiments.bench.simulate import SCHEDULES, Machine, simulate

ROUND = {1: 0.5, 8: 1.0}


def machine(update=3.0, publish=0.0, tokens=1.0, rows=8):
    return Machine(ROUND, tokens, rows, lambda learners: update, publish)


def test_equal_lengths_take_turns_or_overlap_exactly():
    """10 rounds of 8 rows: G = 10 s. L = 3 s, and publishing 1 s."""
    how = dict(batch=8, steps=10)
    sync = simulate("sync", machine(publish=1.0), [10], devices=1, **how)
    assert sync.step_s == pytest.approx(10 + 3 + 1) and sync.staleness_max == 0
    assert sync.generator_busy == pytest.approx(10 / 14, rel=1e-6) and sync.learner_busy == pytest.approx(3 / 14, rel=1e-6)
    one = simulate("one_step", machine(), [10], devices=2, learners=1, **how)
    assert one.step_s == pytest.approx(10) and one.staleness_max == 1
    slow = simulate("one_step", machine(update=25.0), [10], devices=2, learners=1, **how)
    assert slow.step_s == pytest.approx(25) and slow.learner_busy > 0.85
    flight = simulate("in_flight", machine(), [10], devices=2, learners=1, limit=2, **how)
    assert flight.step_s == pytest.approx(10, rel=1e-6)


def test_rounds_of_several_tokens_and_fewer_rows():
    """Two requests of 7 tokens at 2 a round: 4 rounds, each 0.5 + 1/7 of 0.5 s."""
    found = simulate("sync", machine(tokens=2.0), [7], devices=1, batch=2, steps=4)
    assert found.step_s == pytest.approx(4 * (0.5 + 0.5 / 7) + 3)


def test_the_tail_is_filled_in_flight_only():
    tail = [4] * 7 + [60]
    one = simulate("one_step", machine(update=0.1), tail, devices=2, learners=1, batch=8, steps=20)
    flight = simulate("in_flight", machine(update=0.1), tail, devices=2, learners=1, batch=8, steps=20, limit=4)
    assert flight.step_s < 0.75 * one.step_s and flight.generator_busy > one.generator_busy


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_no_schedule_is_older_than_its_limit_and_more_limit_is_no_slower(limit, seed):
    drawn = lengths(400, 20, 1.0, 200, seed)
    how = dict(devices=4, learners=1, batch=12, steps=15)
    found = simulate("in_flight", machine(), drawn, limit=limit, **how)
    looser = simulate("in_flight", machine(), drawn, limit=limit + 2, **how)
    assert found.staleness_max <= limit and found.staleness_mean <= found.staleness_max
    assert looser.step_s <= found.step_s * 1.05
    for value in (found.generator_busy, found.learner_busy, found.utilization):
        assert 0 < value <= 1 + 1e-9


def test_a_plan_has_every_schedule_at_every_scale():
    rows = plan((64, 128), (1, 4), 6)
    assert {(r["devices"], r["schedule"], r["limit"]) for r in rows} == {
        (d, s, k) for d in (64, 128) for s, k in (("sync", 0), ("one_step", 1), ("in_flight", 1), ("in_flight", 4))
    }
    for devices in (64, 128):
        by = {(r["schedule"], r["limit"]): r["step_s"] for r in rows if r["devices"] == devices}
        assert by["in_flight", 4] <= by["one_step", 1] * 1.02 and all(np.isfinite(list(by.values())))
    with pytest.raises(ValueError, match=f"choose one of {', '.join(SCHEDULES)}"):
        simulate("async", machine(), [1], devices=2, batch=2)
    with pytest.raises(ValueError, match="a side has none"):
        simulate("one_step", machine(), [1], devices=1, batch=2)


def test_the_bound_on_two_busy_cores():
    """No speed-up from the second core: overlap halves an even split. Perfect speed-up: nothing to gain."""
    assert overlap_bound(1.0, 1.0, 1.0, 1.0) == 2.0
    assert overlap_bound(1.0, 1.0, 2.0, 2.0) == 1.0
    assert overlap_bound(3.0, 1.0, 1.0, 1.0) == pytest.approx(4 / 3)
    assert overlap_bound(1.0, 1.0, 1.25, 1.6) == pytest.approx(min(2 / 1.6, 1 / 1.25 + 1 / 1.6))
