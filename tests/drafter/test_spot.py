"""Who trains, when, and that nobody waits for it; with clocks and jobs made by hand."""

import threading
import time

import pytest

from adrl_jax.drafter.spot import Coordinator, Phase, Spot


def test_steps_happen_only_where_the_rollout_has_ended_and_only_while_it_goes_on():
    release, stepped = threading.Event(), threading.Event()
    groups = []

    def train(group):
        groups.append(group)
        stepped.set()
        time.sleep(0.002)
        return True

    def long():
        assert stepped.wait(20)  # the short one trains while this one still runs
        release.wait(20)
        return "long"

    def ending():
        time.sleep(0.05)
        release.set()
        return "short"

    spot = Spot(train)
    assert spot.run([long, ending, lambda: "early"]) == ["long", "short", "early"]
    log = spot.wait()
    assert groups and 0 not in groups and len(set(groups)) == 1  # one group at a time, and no other takes over in between
    for step in log.steps:
        assert step.start >= log.finished[step.group] and step.start <= log.over
    assert all(step.end <= log.over for step in log.steps[:-1])
    assert log.over >= max(log.finished)


def test_the_rollout_does_not_wait_for_the_step_under_way():
    began, go = threading.Event(), threading.Event()

    def train(group):
        began.set()
        assert go.wait(20)
        return True

    spot = Spot(train)
    assert spot.run([lambda: 1, lambda: began.wait(20) and 2]) == [1, 2]
    assert not go.is_set()  # `run` came back with a step on its way
    go.set()
    assert spot.wait().steps[0].end > 0


def test_one_group_alone_never_trains():
    def train(group):
        raise AssertionError("the rollout is over when its only group is")

    spot = Spot(train)
    assert spot.run([lambda: 5]) == [5]
    assert spot.wait().steps == ()


def test_nothing_to_train_on_is_no_step_and_is_asked_for_again():
    asked, enough = [], threading.Event()

    def train(group):
        asked.append(group)
        if len(asked) == 4:
            enough.set()
        return False

    spot = Spot(train)
    spot.run([lambda: None, lambda: enough.wait(20)])
    assert spot.wait().steps == () and len(asked) >= 4


def test_errors_reach_whoever_started_it():
    spot = Spot(lambda group: True)
    with pytest.raises(ZeroDivisionError):
        spot.run([lambda: 1 // 0, lambda: 2])

    def train(group):
        raise RuntimeError("in training")

    stop, spot = threading.Event(), Spot(train)

    def job():
        time.sleep(0.05)
        return 7

    # The rollout is whole; the error is told when the training is looked at.
    assert spot.run([lambda: 6, job]) == [6, 7]
    with pytest.raises(RuntimeError, match="in training"):
        spot.wait()
    assert not stop.is_set() and spot.run([lambda: 1]) == [1]


def test_every_transition_of_the_coordinator():
    c = Coordinator(3)
    assert not c.may_step(1)
    c.finish(1)
    assert c.may_step(1) and c.phases == (Phase.ROLLOUT, Phase.TRAINING, Phase.ROLLOUT)
    c.finish(0)
    assert not c.may_step(0) and c.may_step(1)  # there is one drafter
    c.leave(1)
    assert c.may_step(0)
    assert not c.over.is_set()
    c.finish(2)
    assert c.over.is_set() and not c.may_step(0) and not c.may_step(2)
    with pytest.raises(ValueError, match="groups=0"):
        Coordinator(0)
