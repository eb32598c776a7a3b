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


def test_batch_normalised_shares_one_deviation():
    rewards, groups = [1, 0, 0, 0, 5, 5, 1, 5], [0] * 4 + [1] * 4
    centred = np.array([0.75, -0.25, -0.25, -0.25, 1, 1, -3, 1])
    out = advantages.batch_normalized(rewards, groups)
    np.testing.assert_allclose(out.values, centred / (centred.std(ddof=1) + 1e-6), rtol=1e-6)


@pytest.mark.parametrize("usable", [0, 1, 2])
def test_batch_normalised_is_finite_with_few_rewards(usable):
    out = advantages.batch_normalized([3.0, 1.0, 7.0], [0, 0, 0], valid=[i < usable for i in range(3)])
    assert np.all(np.isfinite(out.values)) and np.all(out.values[usable:] == 0)


def test_optimal_baseline_has_the_least_variance():
    rng = np.random.default_rng(0)
    rewards, weights, norms = rng.normal(size=6), rng.uniform(0.5, 2, 6), rng.uniform(1, 9, 6)
    out = advantages.optimal_baseline(rewards, [0] * 6, weights=weights, squared_norms=norms)
    b = rewards - out.values

    def second_moment(baseline):
        return np.sum(weights**2 * norms * (rewards - baseline) ** 2)

    np.testing.assert_allclose(b, b[0], rtol=1e-5)
    assert all(second_moment(b[0]) < second_moment(b[0] + d) for d in (-0.01, 0.01))
    np.testing.assert_allclose(
        advantages.optimal_baseline(rewards, [0] * 6).values, advantages.group_centered(rewards, [0] * 6).values, atol=1e-6
    )


def test_pairs_and_best_by_hand_and_ties():
    rewards, groups = [1, 3, 2, 5, 5, 5], [0] * 3 + [1] * 3
    out = advantages.pairs(rewards, groups)
    np.testing.assert_array_equal(out.values, [-1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(out.valid, [True, True, False, False, False, False])
    assert out.tie_fraction == out.frac_zero_std == 0.5
    arbitrary = advantages.pairs(rewards, groups, ties="first")
    np.testing.assert_array_equal(arbitrary.values[3:], [1, 0, -1])
    assert arbitrary.tie_fraction == 0
    np.testing.assert_array_equal(advantages.best(rewards, groups).valid, [False, True, False, False, False, False])
    np.testing.assert_array_equal(advantages.best(rewards, groups, ties="first").values, [0, 1, 0, 1, 0, 0])
    assert not advantages.pairs([1.0, np.nan], [0, 0]).valid.any()  # one side is missing
    with pytest.raises(ValueError, match="ties='last' is unknown; choose one of skip, first"):
        advantages.pairs(rewards, groups, ties="last")


def test_gae_against_the_sum_it_stands_for():
    rng = np.random.default_rng(0)
    rewards, values, gamma, lam, beyond = rng.normal(size=5), rng.normal(size=5), 0.9, 0.8, 0.7
    later = np.append(values[1:], beyond)
    deltas = rewards + gamma * later - values
    expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, 5)) for t in range(5)]
    out, returns = advantages.gae(rewards, values, bootstrap=beyond, gamma=gamma, lam=lam)
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    np.testing.assert_allclose(returns, out + values)


def test_a_cut_off_response_by_hand():
    values = np.ones(3)
    np.testing.assert_array_equal(advantages.gae(np.zeros(3), values, bootstrap=1.0, lam=1.0)[0], [0, 0, 0])
    np.testing.assert_array_equal(advantages.gae(np.zeros(3), values, lam=1.0)[0], [-1, -1, -1])


def test_whitening_is_over_tokens_and_finite():
    out = advantages.whitened([np.array([1.0, 2.0]), np.array([6.0])])
    flat = np.concatenate(out)
    assert flat.mean() == pytest.approx(0, abs=1e-6) and flat.std(ddof=1) == pytest.approx(1, rel=1e-5)
    for few in ([], [np.zeros(0)], [np.array([3.0])], [np.array([2.0, 2.0])]):
        assert all(np.all(v == 0) for v in advantages.whitened(few))
