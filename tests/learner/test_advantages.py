"""Advantages against hand values."""

import numpy as np
import pytest

from adrl_jax.learner import advantages


def test_normalised_within_each_group():
    out = advantages.group_normalized([1, 0, 0, 0, 1, 1, 1, 0], [7] * 4 + [3] * 4)
    np.testing.assert_allclose(out.values, [1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5], atol=1e-5)
    assert out.frac_zero_std == 0 and out.valid.all()


def test_sample_deviation_is_used():
    out = advantages.group_normalized([1, 1, 1, 0, 0, 0, 0, 0], [0] * 8)
    np.testing.assert_allclose(out.values[[0, -1]], [1.2076, -0.7246], atol=1e-4)


@pytest.mark.parametrize("function", [advantages.group_normalized, advantages.group_centered, advantages.leave_one_out])
def test_equal_rewards_give_exactly_zero(function):
    for rewards in ([1] * 4, [0] * 4, [0.1] * 8, np.full(8, 0.1, np.float32)):
        out = function(rewards, [0] * len(rewards))
        assert np.all(out.values == 0) and out.frac_zero_std == 1.0
    mixed = function([1, 1, 0, 1], [0, 0, 1, 1])
    assert mixed.frac_zero_std == 0.5 and np.all(mixed.values[:2] == 0) and np.all(mixed.values[2:] != 0)


@pytest.mark.parametrize("function", [advantages.group_normalized, advantages.group_centered, advantages.leave_one_out])
def test_one_sample_has_no_advantage(function):
    out = function([3.0, 1.0], [0, 1])
    assert np.all(out.values == 0) and out.frac_zero_std == 1.0


@pytest.mark.parametrize("function", [advantages.group_normalized, advantages.group_centered, advantages.leave_one_out])
@pytest.mark.parametrize("groups,samples", [(2, 2), (3, 2), (2, 3), (3, 3)])
def test_groups_go_by_id_not_by_place(function, groups, samples):
    tiled = np.tile(np.arange(groups), samples)
    assert np.all(function(tiled, tiled).values == 0)  # reward = prompt id
    rewards = np.random.default_rng(0).normal(size=groups * samples)
    out = function(rewards, tiled).values
    order = np.random.default_rng(1).permutation(groups * samples)
    np.testing.assert_array_equal(function(rewards[order], tiled[order]).values, out[order])
    for g in range(groups):
        np.testing.assert_allclose(out[tiled == g].sum(), 0, atol=1e-6)


def test_leave_one_out_by_hand():
    out = advantages.leave_one_out([1, 0, 0, 0, 1, 1, 1, 0], ["A"] * 4 + ["B"] * 4)
    np.testing.assert_allclose(out.values, [1, -1 / 3, -1 / 3, -1 / 3, 1 / 3, 1 / 3, 1 / 3, -1], rtol=1e-6)
    out = advantages.leave_one_out([1, 1, 1, 0, 0, 0, 0, 0], [0] * 8)
    np.testing.assert_allclose(out.values[[0, -1]], [0.7143, -0.4286], atol=1e-4)


def test_centered_by_hand():
    np.testing.assert_allclose(advantages.group_centered([1, 0, 0, 0], [0] * 4).values, [0.75, -0.25, -0.25, -0.25])


def test_nan_rewards_carry_no_weight():
    out = advantages.group_normalized([1, np.nan, 0, 1], [0] * 4)
    np.testing.assert_array_equal(out.valid, [True, False, True, True])
    assert np.all(np.isfinite(out.values)) and out.values[1] == 0
    np.testing.assert_allclose(out.values[[0, 2, 3]], advantages.group_normalized([1, 0, 1], [0] * 3).values)
    assert advantages.group_normalized([np.nan] * 2, [0, 0]).frac_zero_std == 0.0


def test_rejected_samples_shape_no_baseline():
    out = advantages.leave_one_out([100, 1, 0], [0] * 3, valid=[False, True, True])
    np.testing.assert_allclose(out.values, [0, 1, -1])


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="must be vectors of one length"):
        advantages.group_normalized([1, 2], [0])
    with pytest.raises(ValueError, match="must have one length"):
        advantages.group_normalized([1, 2], [0, 0], valid=[True])
