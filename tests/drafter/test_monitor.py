"""When the drafter is trained on demand, and when the alarm goes off: by hand."""

import dataclasses

import pytest

from adrl_jax.drafter.monitor import Measured, MonitorConfig, MonitorState, measure, observe
from adrl_jax.speculation.strategy import OFF, Strategy

CONFIG = MonitorConfig(fall=0.2, smoothing=1.0, patience=3, min_drafts=10, alarm_steps=2)


def seen(acceptance, length=2.0, drafts=100):
    return Measured(drafts, round(acceptance * drafts), drafts, round(length * drafts))


def run(values, config=CONFIG):
    states, notes, state = [], [], MonitorState()
    for value in values:
        state, said = observe(config, state, seen(value))
        states.append(state)
        notes.append(said)
    return states, notes


def test_training_begins_past_the_fall_and_ends_halfway_back():
    states, notes = run([0.8, 0.7, 0.65, 0.63, 0.70, 0.73, 0.70])
    assert [s.training for s in states] == [False, False, False, True, True, False, False]
    assert ["fell to 0.630 from 0.800" in " ".join(n) for n in notes] == [False, False, False, True, False, False, False]
    assert "recovered" in notes[5][0] and all(s.best == 0.8 for s in states)


def test_a_best_that_is_out_of_reach_fades():
    states, notes = run([0.8, 0.5, 0.5, 0.5, 0.5, 0.5, 0.38])
    assert [s.training for s in states] == [False, True, True, True, False, False, True]
    assert states[4].best == 0.5 and "no longer 0.800" in notes[4][0]


def test_smoothing_and_thin_steps():
    half = dataclasses.replace(CONFIG, smoothing=0.5)
    states, _ = run([0.8, 0.6], half)
    assert states[1].current == pytest.approx(0.7)
    state, notes = observe(CONFIG, states[1], seen(0.0, drafts=9))
    assert state == states[1] and notes == []


def test_the_alarm_goes_off_once_when_nothing_is_accepted_any_more():
    state, said = MonitorState(), []
    for length in (1.5, 1.0, 1.01, 1.0, 1.3, 1.0, 1.0):
        state, notes = observe(CONFIG, state, seen(0.5, length))
        said.append(any("no draft is accepted" in n for n in notes))
    assert said == [False, False, True, False, False, False, True]


def test_only_launches_of_the_learned_drafter_count():
    class Launch:
        def __init__(self, arm, examined=(), accepted=(), passes=0, tokens=0):
            self.arm, self.examined, self.accepted = arm, examined, accepted
            self.accept_passes, self.accept_tokens = passes, tokens

    strategies = (OFF, Strategy("ngram", 2), Strategy("eagle", 2), Strategy("eagle", 1))
    launches = [Launch(0), Launch(1, (9, 9), (9, 9), 9, 27), Launch(2, (8, 5), (5, 1), 8, 14), Launch(3, (4,), (3,), 4, 7)]
    assert measure(launches, strategies, ("eagle",)) == Measured(12, 8, 12, 21)


@pytest.mark.parametrize(
    "fields", [dict(fall=0.0), dict(smoothing=2.0), dict(patience=0), dict(alarm_steps=1.5), dict(alarm_length=0.9)]
)
def test_bad_settings_name_the_field(fields):
    with pytest.raises(ValueError, match=f"MonitorConfig.{next(iter(fields))}="):
        MonitorConfig(**fields)
