"""The most frequent ids first, by hand-counted texts."""

import numpy as np
import pytest

from adrl_jax.drafter.vocabulary import choose_ids, coverage
from adrl_jax.types import FinishReason, Rollout, SamplingParams


def rollout(prompt, response):
    n = len(response)
    facts = (np.zeros(n, np.float32), np.zeros(n, np.int32), FinishReason.STOP, SamplingParams())
    return Rollout(0, 0, 0, 0, np.array([*prompt, *response], np.int32), len(prompt), n, *facts)


TEXTS = [rollout([9, 9, 8], [5, 5, 5, 3, 3]), rollout([8, 8, 8], [5, 7, 3, 6])]


@pytest.mark.parametrize(
    ("size", "always", "expected"),
    [
        (2, (), [3, 5]),
        (3, (), [3, 5, 6]),  # 6 and 7 are equally frequent: the lower one
        (4, (), [3, 5, 6, 7]),
        (5, (), [3, 5, 6, 7, 8]),  # then what prompts say most often
        (8, (), [0, 1, 3, 5, 6, 7, 8, 9]),  # then the lowest
        (2, (11,), [5, 11]),
        (2, (11, 0), [0, 11]),
        (12, (), list(range(12))),
    ],
)
def test_ranking(size, always, expected):
    found = choose_ids(TEXTS, size, 14, valid_vocab=12, always=always)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.int32


def test_coverage():
    assert coverage(TEXTS, np.array([3, 5])) == pytest.approx(7 / 9)
    assert np.isnan(coverage([], np.array([3])))


def test_faults_name_the_value():
    with pytest.raises(ValueError, match=r"size=13 must be in \[1, 12\]"):
        choose_ids(TEXTS, 13, 14, valid_vocab=12)
    with pytest.raises(ValueError, match=r"always=\[12\]"):
        choose_ids(TEXTS, 3, 14, valid_vocab=12, always=(12,))
    with pytest.raises(ValueError, match="at most size=1"):
        choose_ids(TEXTS, 1, 14, always=(1, 2))
