import dataclasses
import warnings

import numpy as np
import pytest

from adrl_jax.rewards.grading import Grader, portable_score, summarize
from adrl_jax.types import Prompt, Score

PROMPTS = [Prompt(i, np.array([1]), f"question {i}") for i in range(3)]
WHOLE = [False] * 3


@pytest.mark.parametrize("workers", [0, 1])
def test_scores_in_order(misbehaving, workers):
    with Grader(misbehaving.length, workers=workers) as grader:
        scores = grader.grade(PROMPTS, ["a", "bbb", "cc"], WHOLE)
    assert [s.value for s in scores] == [1.0, 3.0, 2.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_ends_the_batch_unless_configured(misbehaving, workers):
    with Grader(misbehaving.obeys, workers=workers) as grader, pytest.raises(KeyError, match="no such answer"):
        grader.grade(PROMPTS, ["fine", "raise", "fine"], WHOLE)
    with Grader(misbehaving.obeys, workers=workers, on_error="zero") as grader:
        scores = grader.grade(PROMPTS, ["fine", "raise", "fine"], WHOLE)
    assert [s.reason for s in scores] == ["match", "error", "match"]
    assert "KeyError" in scores[1].detail


@pytest.mark.parametrize("workers", [0, 1])
def test_nan_reward_names_prompt_and_value(misbehaving, workers):
    with Grader(misbehaving.obeys, workers=workers) as grader, pytest.raises(ValueError, match=r"prompt 2 is nan.*question 2"):
        grader.grade(PROMPTS, ["fine", "fine", "nan"], WHOLE)


def test_warns_where_nothing_parses():
    def unparsed(prompt, response, truncated):
        return Score(0.0, None, "unparsed_response" if response == "?" else "mismatch")

    with Grader(unparsed, workers=0) as grader:
        with pytest.warns(UserWarning, match="none of 3 responses"):
            grader.grade(PROMPTS, ["?"] * 3, WHOLE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            grader.grade(PROMPTS, ["?", "?", "5"], WHOLE)


def test_lengths_must_agree(misbehaving):
    with Grader(misbehaving.length, workers=0) as grader, pytest.raises(ValueError, match="3, 2, 3"):
        grader.grade(PROMPTS, ["a", "b"], WHOLE)


def test_unknown_policy_is_an_error(misbehaving):
    with pytest.raises(ValueError, match="on_error='skip'"):
        Grader(misbehaving.length, workers=0, on_error="skip")


def test_workers_get_the_task_without_its_tokenizer():
    @dataclasses.dataclass(frozen=True)
    class Task:
        tokenizer: object = None

        def score(self, prompt, response, truncated):
            return Score(1.0, None, "match")

    bound = portable_score(Task(tokenizer=object()).score)
    assert bound.__self__.tokenizer is None
    assert bound(None, "", False).value == 1.0


def test_summary_counts_every_reason():
    scores = [
        Score(1.0, "5", "match"),
        Score(0.0, "4", "mismatch"),
        Score(0.0, None, "unparsed_response"),
        Score(0.0, None, "timeout"),
    ]
    summary = summarize(scores)
    assert summary["mean"] == 0.25 and summary["parsed_fraction"] == 0.5
    assert summary["timeout_count"] == 1 and summary["error_count"] == 0 and summary["unparsed_reference_count"] == 0
    with pytest.raises(ValueError, match="no scores"):
        summarize([])
