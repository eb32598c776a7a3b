"""Scoring a batch: what is refused, and what is said aloud."""

import numpy as np
import pytest

from adrl_jax.models.tokenizer import CharTokenizer
from adrl_jax.runtime import collect
from adrl_jax.types import FinishReason, Prompt, Rollout, SamplingParams, Score

TOKENIZER = CharTokenizer("0123456789=")


def scored_by(scores):
    prompt = Prompt(7, TOKENIZER.encode("1="), "1=")
    ids = TOKENIZER.encode("1=42")
    rollout = Rollout(7, 0, 0, 0, ids, 2, 2, np.zeros(2), np.zeros(2), FinishReason.STOP, SamplingParams())
    return collect.score([rollout] * len(scores), [prompt] * len(scores), TOKENIZER, lambda items: list(scores))


def test_a_batch_in_which_nothing_parses_is_said_aloud():
    unread = Score(0.0, None, "unparsed_response")
    with pytest.warns(UserWarning, match="none of 2 responses has an answer"):
        scored_by([unread, unread])


def test_one_answer_that_parses_is_enough(recwarn):
    out = scored_by([Score(0.0, None, "unparsed_response"), Score(0.0, "42", "mismatch")])
    assert not recwarn.list and out.texts == ["42", "42"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_drops_its_response_and_is_counted(value):
    out = scored_by([Score(value, "42", "match"), Score(1.0, "42", "match"), Score(0.0, None, "unparsed_reference")])
    np.testing.assert_array_equal(out.usable, [False, True, False])
    row = collect.metrics(out)
    assert row["reward/mean"] == 0.5 and row["reward/nonfinite"] == pytest.approx(1 / 3)
    with pytest.raises(collect.RewardError, match=f"no reward of 2 .* of prompt 7, is {value!r}"):
        scored_by([Score(value, "42", "match")] * 2)


def test_a_scorer_that_failed_ends_the_run_with_its_words():
    with pytest.raises(collect.RewardError, match="prompt 7 failed: it broke"):
        scored_by([Score(0.0, None, "error", detail="it broke")])
