"""Rewards before they become advantages, by hand."""

import numpy as np
import pytest

from adrl_jax.learner import shaping, weights


def test_replace_and_subtract_are_not_the_same():
    scores, cut = np.array([3.0, -2.0, 1.0]), np.array([True, True, False])
    np.testing.assert_array_equal(shaping.eos_penalty(scores, cut, "replace", 1.0), [-1, -1, 1])
    np.testing.assert_array_equal(shaping.eos_penalty(scores, cut, "subtract", 1.0), [2, -3, 1])
    np.testing.assert_array_equal(shaping.eos_penalty(scores, cut, "none", 0.0), scores)
    with pytest.raises(ValueError, match="eos_rule='drop' is unknown; choose one of none, replace, subtract"):
        shaping.eos_penalty(scores, cut, "drop", 1.0)


def test_overlong_punishment_is_dapos():
    # L_max 20, cache 4: 0 up to 16, -1 at 20, a line between.
    np.testing.assert_allclose(shaping.overlong_penalty([1, 16, 17, 18, 20], 20, 4, 1.0), [0, 0, 0.25, 0.5, 1.0])
    np.testing.assert_allclose(shaping.overlong_penalty([20], 20, 4, 0.3), [0.3])


def test_kl_penalties_by_hand():
    out = [shaping.token_penalties([np.array([-1.0])], [np.array([-1.5])], k)[0][0] for k in ("k1", "k2", "k3")]
    np.testing.assert_allclose(out, [0.5, 0.125, 0.10653], atol=1e-5)


def test_m2po_keeps_the_most_tokens_that_meet_the_limit():
    rng = np.random.default_rng(0)
    parts = [rng.normal(0, 0.5, n) for n in (3, 5, 1)]
    keep = np.concatenate(weights.second_moment_mask(parts, 0.04))
    square = np.concatenate(parts) ** 2
    assert 0 < keep.sum() < keep.size and square[keep].mean() < 0.04
    assert square[keep].max() < square[~keep].min()
    one_more = np.sort(square)[: keep.sum() + 1]
    assert one_more.mean() >= 0.04
    assert all(k.all() for k in weights.second_moment_mask(parts, 10.0))
    assert not any(k.any() for k in weights.second_moment_mask([np.ones(2)], 0.04))
