"""The trace of arms: written by name, read back as indices, refused where it does not fit."""

import pytest

from adrl_jax.metrics import JsonLines
from adrl_jax.rollout.stats import LaunchRecord
from adrl_jax.runtime import arms
from adrl_jax.speculation.strategy import OFF, Strategy

STRATEGIES = (OFF, Strategy("eagle", 4), Strategy("ngram", 2))


def launch(arm):
    return LaunchRecord(arm, 3, 4, 64, 2, 6, 0.5, 1.0, False, 2, 5)


@pytest.fixture
def trace(tmp_path):
    lines = JsonLines(tmp_path / "arms.jsonl")
    for step, used in ((1, (0, 1, 1)), (2, (2,))):
        lines.append(arms.record(step, [launch(a) for a in used], STRATEGIES, [4, 9]))
    lines.close()
    return tmp_path / "arms.jsonl"


def test_names_travel_and_indices_follow_the_run(trace):
    assert arms.load(trace, STRATEGIES, [1, 2]) == {1: [0, 1, 1], 2: [2]}
    assert arms.load(trace, STRATEGIES[::-1], [1]) == {1: [2, 1, 1]}


def test_what_does_not_fit_is_named(trace, tmp_path):
    with pytest.raises(ValueError, match=r"has no step 3; it covers steps 1 to 2"):
        arms.load(trace, STRATEGIES, [1, 2, 3])
    with pytest.raises(ValueError, match=r"uses the arm 'ngram-d2'; this run has off, eagle-d4"):
        arms.load(trace, STRATEGIES[:2], [2])
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="no step at all"):
        arms.load(tmp_path / "empty.jsonl", STRATEGIES, [1])
