import pytest

from adrl_jax.rewards.exact import score_exact


@pytest.mark.parametrize(
    "response, reference, value, reason",
    [
        ("  two\n words ", "two words", 1.0, "match"),
        ("Two words", "two words", 0.0, "mismatch"),
        ("", "two", 0.0, "unparsed_response"),
        ("two", " ", 0.0, "unparsed_reference"),
    ],
)
def test_equality_of_text(response, reference, value, reason):
    score = score_exact(response, reference)
    assert (score.value, score.reason) == (value, reason)


def test_case_and_truncation():
    assert score_exact("TWO", "two", ignore_case=True).value == 1
    assert score_exact("two", "two", truncated=True).reason == "unparsed_response"
