"""Losses, aggregation and diagnostics against hand values and float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.learner import importance, kl, losses, sequences, surrogates
from adrl_jax.learner.aggregation import aggregation_weights
from adrl_jax.learner.loss_config import LossConfig
from adrl_jax.learner.row import Row


def aggregate(kind, token_losses, owner, mask, length=None):
    weights, denominator = aggregation_weights(jnp.array(owner), jnp.array(mask), kind, length)
    return float(jnp.sum(weights * jnp.array(token_losses)) / denominator)


@pytest.mark.parametrize("kind,length,expected", [("token", None, 2.5), ("sequence", None, 2.0), ("constant", 4, 1.25)])
def test_aggregation_by_hand(kind, length, expected):
    # Token losses [1] and [3, 3, 3].
    owner, values = [4, 9, 9, 9, 0, 0], [1.0, 3, 3, 3, 77, 77]
    mask = [True] * 4 + [False] * 2
    assert aggregate(kind, values, owner, mask, length) == pytest.approx(expected)
    # Two microbatches, or a device each: numerators and denominators add up.
    parts = [(values[:1], owner[:1], [True]), (values[1:4], owner[1:4], [True] * 3)]
    pairs = [aggregation_weights(jnp.array(o), jnp.array(m), kind, length) for _, o, m in parts]
    numerator = sum(float(jnp.sum(w * jnp.array(v))) for (w, _), (v, _, _) in zip(pairs, parts, strict=True))
    assert numerator / sum(float(d) for _, d in pairs) == pytest.approx(expected)


def test_eight_devices_by_hand():
    # Sums [10, 7, 4 x 6] over tokens [1, 7, 4 x 6] are 41 / 32, not a mean of means.
    sums, tokens = [10, 7] + [4] * 6, [1, 7] + [4] * 6
    total = losses.Loss(jnp.float32(0), jnp.float32(0), {}, {})
    for s, n in zip(sums, tokens, strict=True):
        total = losses.combine(total, losses.Loss(jnp.float32(s), jnp.float32(n), {}, {}))
    assert float(total.numerator / total.denominator) == 41 / 32 == 1.28125


def test_sequences_of_one_row_are_told_apart():
    owner = jnp.array([3, 3, 5, 3, 0])
    mask = jnp.array([True, True, True, True, False])
    np.testing.assert_array_equal(sequences.sequence_numbers(owner, mask), [0, 0, 1, 2, 2])
    np.testing.assert_array_equal(sequences.sequence_lengths(owner, mask)[:4], [2, 2, 1, 1])


def test_clipped_surrogate_by_hand():
    ratio = np.array([0.5, 0.9, 1.0, 1.1, 2.0, 0.5, 2.0])
    advantage = np.array([1.0, 1, 1, 1, 1, -1, -1])
    value = surrogates.clipped_surrogate(jnp.log(jnp.array(ratio)), jnp.array(advantage), 0.2, 0.3)
    np.testing.assert_allclose(value, [-0.5, -0.9, -1.0, -1.1, -1.3, 0.8, 2.0], rtol=1e-6)
    gradient = jax.grad(lambda x: surrogates.clipped_surrogate(x, jnp.array(advantage), 0.2, 0.3).sum())
    np.testing.assert_allclose(gradient(jnp.log(jnp.array(ratio))), [-0.5, -0.9, -1, -1.1, 0, 0, 2.0], rtol=1e-6)
    for huge in (200.0, -200.0):
        for a in (1.0, -1.0):
            assert np.isfinite(jax.grad(lambda x, a=a: surrogates.clipped_surrogate(x, jnp.float32(a), 0.2, 0.3))(huge))


def row_of(log_probs, behaviour, advantages, mask=None, **fields):
    log_probs, behaviour, advantages = (jnp.asarray(x, jnp.float32) for x in (log_probs, behaviour, advantages))
    zeros = jnp.zeros(log_probs.shape, jnp.int32)
    mask = jnp.ones(log_probs.shape, bool) if mask is None else jnp.asarray(mask)
    return Row(log_probs, jnp.zeros_like(log_probs), behaviour, advantages, mask, zeros, zeros, zeros)._replace(**fields)


def test_kl_estimates_by_hand():
    # Policy -1.0, reference -1.5.
    out = kl.kl_estimates(jnp.array([-1.0]), jnp.array([-1.5]))
    np.testing.assert_allclose([out["k1"][0], out["k2"][0], out["k3"][0]], [0.5, 0.125, 0.1065], atol=1e-4)
    grid = jnp.linspace(-4, 4, 41)
    assert np.all(kl.kl_estimates(grid, jnp.zeros(41))["k3"] >= 0)


def test_diagnostics_by_hand():
    row = row_of([-1.0, -1.5, 0.0], [-2.0, -1.0, 0.0], [0.0] * 3, [True, True, False])
    sums, maxima = importance.diagnostic_sums(row, jnp.array([True, False, False]))
    out = {k: float(v) for k, v in importance.diagnostics(sums, maxima).items()}
    w = np.exp([1.0, -0.5])
    assert out["k1"] == pytest.approx((-1 + 0.5) / 2)
    assert out["k2"] == pytest.approx((1 + 0.25) / 4)
    assert out["k3"] == pytest.approx(np.mean([np.e - 2, np.exp(-0.5) - 0.5]), rel=1e-5)
    assert out["max_abs_delta"] == pytest.approx(1.0) and out["mean_abs_delta"] == pytest.approx(0.75)
    assert out["ess"] == pytest.approx(w.sum() ** 2 / (2 * (w**2).sum()), rel=1e-5)
    assert out["weight_mean"] == pytest.approx(w.mean(), rel=1e-5)
    assert out["weight_std"] == pytest.approx(w.std(), rel=1e-4) and out["weight_max"] == pytest.approx(np.e, rel=1e-5)
    assert out["chi2"] == pytest.approx((w**2).mean() - 1, rel=1e-5)
    assert out["masked_share"] == 0.5 and out["masked_response_share"] == 0.0
    assert out["ess_response"] == pytest.approx(1.0) and out["chi2_response"] == pytest.approx(np.e - 1, rel=1e-5)


def test_diagnostics_are_split_by_source_and_age():
    d = np.array([0.1, -0.2, 0.3, 0.4])
    row = row_of(-1 + d, -np.ones(4), np.zeros(4), staleness=jnp.array([0, 1, 3, 9]), proximal=jnp.full(4, -0.9))
    out = importance.diagnostics(*importance.diagnostic_sums(row, row.mask))
    np.testing.assert_allclose([out[f"age{i}/mean_abs_delta"] for i in range(4)], [0.1, 0.2, 0.0, 0.35], rtol=1e-5)
    np.testing.assert_allclose([out[f"age{i}/share"] for i in range(4)], [0.25, 0.25, 0, 0.5])
    np.testing.assert_allclose(out["engine/k1"], -0.1, rtol=1e-5)
    np.testing.assert_allclose(out["stale/k1"], -np.mean(d - 0.1), rtol=1e-4)
    np.testing.assert_allclose(out["engine/mean_abs_delta"], 0.1, rtol=1e-5)


def test_the_99th_percentile_is_known_to_a_bin():
    rng = np.random.default_rng(0)
    for scale in (1e-3, 1.0):
        d = rng.exponential(scale, 1000).astype(np.float32)
        row = row_of(d, np.zeros(1000), np.zeros(1000))
        out = importance.diagnostics(*importance.diagnostic_sums(row, row.mask))
        true = np.percentile(d, 99)
        assert true <= float(out["p99_abs_delta"]) <= 1.23 * true
        assert float(out["max_abs_delta"]) == d.max()


def test_clip_fractions_count_what_the_clip_stops():
    row = row_of(np.log([2.0, 2.0, 0.5, 0.5, 1.0]), np.zeros(5), [1.0, -1, 1, -1, 1])
    out = losses.metrics(losses.policy_loss(LossConfig(), row))
    assert float(out["clip_frac_high"]) == pytest.approx(0.2) and float(out["clip_frac_low"]) == pytest.approx(0.2)
    dual = losses.metrics(losses.policy_loss(LossConfig(dual_clip=1.5), row))
    assert float(dual["clip_frac_high"]) == pytest.approx(0.4)
