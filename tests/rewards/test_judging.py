"""Win-rates, pass@k, perplexity, KL and slopes by hand."""

import itertools

import numpy as np
import pytest

from adrl_jax.rewards import judging


def test_win_rate_counts_ties_half_and_all_pairs_of_samples():
    assert judging.win_rate([1, 0, 0.5, 2], [0, 1, 0.5, 2]).value == 0.5
    assert judging.win_rate([[1, 0]], [[0, 0]]).value == 0.75
    with pytest.raises(ValueError, match="ours has 2 prompts, theirs 1"):
        judging.win_rate([1, 2], [1])


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_equals_the_share_of_subsets_with_a_right_answer(k):
    correct = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)
    expected = np.mean([np.mean([any(row[list(s)]) for s in itertools.combinations(range(5), k)]) for row in correct])
    assert judging.pass_at_k(correct, k).value == pytest.approx(expected)


def test_pass_at_k_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="k=6 must be between 1 and the 5 samples"):
        judging.pass_at_k(np.ones((2, 5), bool), 6)


def test_intervals_cover_the_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = [e.low <= 0.3 <= e.high for e in (judging.bootstrap(rng.random(80) < 0.3, resamples=300) for _ in range(200))]
    assert 0.88 <= np.mean(covered) <= 0.99
    with pytest.raises(ValueError, match="shape"):
        judging.bootstrap(np.zeros(0))


def test_perplexity_and_divergence_by_hand():
    assert judging.perplexity([np.log([0.5, 0.25]), np.log([0.5])]) == pytest.approx(16 ** (1 / 3))
    out = judging.divergence([np.array([-1.0, -1.0]), np.array([-2.0])], [np.array([-1.5, -1.25]), np.array([-2.5])])
    assert out.value == pytest.approx((0.75 + 0.5) / 2)


def test_a_slope_and_its_interval():
    rng = np.random.default_rng(0)
    x = np.repeat([0.0, 1, 2, 3], 6)
    found = judging.slope(x, 2 - 0.5 * x + rng.normal(0, 0.1, x.size))
    assert found.low < -0.5 < found.high and found.high - found.low < 0.2
    with pytest.raises(ValueError, match="two distinct x"):
        judging.slope([1, 1], [0, 1])
