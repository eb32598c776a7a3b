"""Losses, aggregation and diagnostics against hand values and float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.learner import importance, losses
from adrl_jax.learner.losses import LossConfig


def aggregate(kind, token_losses, owner, mask, length=None):
    weights, denominator = losses.aggregation_weights(jnp.array(owner), jnp.array(mask), kind, length)
    return float(jnp.sum(weights * jnp.array(token_losses)) / denominator)


@pytest.mark.parametrize("kind,length,expected", [("token", None, 2.5), ("sequence", None, 2.0), ("constant", 4, 1.25)])
def test_aggregation_by_hand(kind, length, expected):
    # Token losses [1] and [3, 3, 3].
    owner, values = [4, 9, 9, 9, 0, 0], [1.0, 3, 3, 3, 77, 77]
    mask = [True] * 4 + [False] * 2
    assert aggregate(kind, values, owner, mask, length) == pytest.approx(expected)
    # Two microbatches, or a device each: numerators and denominators add up.
    parts = [(values[:1], owner[:1], [True]), (values[1:4], owner[1:4], [True] * 3)]
    pairs = [losses.aggregation_weights(jnp.array(o), jnp.array(m), kind, length) for _, o, m in parts]
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
    np.testing.assert_array_equal(losses.sequence_numbers(owner, mask), [0, 0, 1, 2, 2])
    np.testing.assert_array_equal(losses.sequence_lengths(owner, mask)[:4], [2, 2, 1, 1])


def test_clipped_surrogate_by_hand():
    ratio = np.array([0.5, 0.9, 1.0, 1.1, 2.0, 0.5, 2.0])
    advantage = np.array([1.0, 1, 1, 1, 1, -1, -1])
    value = losses.clipped_surrogate(jnp.log(jnp.array(ratio)), jnp.array(advantage), 0.2, 0.3)
    np.testing.assert_allclose(value, [-0.5, -0.9, -1.0, -1.1, -1.3, 0.8, 2.0], rtol=1e-6)
    gradient = jax.grad(lambda x: losses.clipped_surrogate(x, jnp.array(advantage), 0.2, 0.3).sum())
    np.testing.assert_allclose(gradient(jnp.log(jnp.array(ratio))), [-0.5, -0.9, -1, -1.1, 0, 0, 2.0], rtol=1e-6)
    for huge in (200.0, -200.0):
        for a in (1.0, -1.0):
            assert np.isfinite(jax.grad(lambda x, a=a: losses.clipped_surrogate(x, jnp.float32(a), 0.2, 0.3))(huge))


def numpy_grpo(config, log_probs, entropy, behaviour, advantages, mask, owner):
    total, weight = 0.0, 0.0
    lengths = {o: np.sum(mask & (owner == o)) for o in set(owner[mask])}
    for i in np.flatnonzero(mask):
        r = np.exp(log_probs[i] - behaviour[i])
        clipped = min(max(r, 1 - config.clip_low), 1 + config.clip_high)
        term = -min(r * advantages[i], clipped * advantages[i]) - config.entropy_coef * entropy[i]
        total += term / lengths[owner[i]] if config.aggregation == "sequence" else term
        weight += {"token": 1.0, "sequence": 1 / lengths[owner[i]]}.get(config.aggregation, 0)
    if config.aggregation == "constant":
        weight = len(lengths) * config.constant_length
    return total / weight


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_grpo_equals_float64_numpy_in_value_and_gradient(aggregation):
    rng = np.random.default_rng(0)
    owner = np.array([0] * 3 + [2] * 5 + [1] + [0] * 3)
    mask = np.array([True] * 9 + [False] * 3)
    behaviour, entropy = rng.normal(-2, 0.5, 12), rng.uniform(0, 2, 12)
    log_probs = behaviour + rng.normal(0, 0.3, 12)
    advantages = rng.normal(size=12)
    config = LossConfig(0.1, 0.25, aggregation, 7 if aggregation == "constant" else None, 0.05)

    def ours(lp, ent):
        f32 = [jnp.asarray(x, jnp.float32) for x in (behaviour, advantages)]
        loss = losses.grpo(config, lp, ent, *f32, jnp.asarray(mask), jnp.asarray(owner))
        return loss.numerator / loss.denominator

    inputs = jnp.asarray(log_probs, jnp.float32), jnp.asarray(entropy, jnp.float32)
    value, gradients = jax.value_and_grad(ours, (0, 1))(*inputs)
    arguments = (behaviour, advantages, mask, owner)
    np.testing.assert_allclose(value, numpy_grpo(config, log_probs, entropy, *arguments), rtol=1e-5)
    for which, gradient in enumerate(gradients):
        for i in range(12):
            shifted = []
            for step in (1e-6, -1e-6):
                moved = [log_probs.copy(), entropy.copy()]
                moved[which][i] += step
                shifted.append(numpy_grpo(config, *moved, *arguments))
            np.testing.assert_allclose(gradient[i], (shifted[0] - shifted[1]) / 2e-6, rtol=1e-4, atol=1e-7)
        assert np.all(np.asarray(gradient)[~mask] == 0)


def test_masked_numbers_are_irrelevant():
    mask, owner = jnp.array([True, False]), jnp.array([0, 1])

    def loss(lp, junk):
        values = jnp.array([1.0, junk])
        return losses.grpo(LossConfig(), lp, values, values, values, mask, owner).numerator

    for junk in (0.0, np.nan, np.inf, 1e38):
        lp = jnp.array([1.0, junk])
        assert float(loss(lp, junk)) == -1.0
        np.testing.assert_array_equal(jax.grad(loss)(lp, junk), [-1.0, 0.0])


def test_kl_estimates_by_hand():
    # Policy -1.0, reference -1.5.
    out = importance.kl_estimates(jnp.array([-1.0]), jnp.array([-1.5]))
    np.testing.assert_allclose([out["k1"][0], out["k2"][0], out["k3"][0]], [0.5, 0.125, 0.1065], atol=1e-4)
    grid = jnp.linspace(-4, 4, 41)
    assert np.all(importance.kl_estimates(grid, jnp.zeros(41))["k3"] >= 0)


def test_diagnostics_by_hand():
    log_probs, behaviour = jnp.array([-1.0, -1.5, 9.0]), jnp.array([-2.0, -1.0, 0.0])
    sums, maxima = importance.diagnostic_sums(log_probs, behaviour, jnp.array([True, True, False]))
    out = {k: float(v) for k, v in importance.diagnostics(sums, maxima).items()}
    w = np.exp([1.0, -0.5])
    assert out["k1"] == pytest.approx((-1 + 0.5) / 2)
    assert out["k3"] == pytest.approx(np.mean([np.e - 2, np.exp(-0.5) - 0.5]), rel=1e-5)
    assert out["max_abs_delta"] == pytest.approx(1.0)
    assert out["ess"] == pytest.approx(w.sum() ** 2 / (2 * (w**2).sum()), rel=1e-5)
    assert out["weight_mean"] == pytest.approx(w.mean(), rel=1e-5)


def test_clip_fractions_count_what_the_clip_stops():
    delta = jnp.log(jnp.array([2.0, 2.0, 0.5, 0.5, 1.0]))
    advantages = jnp.array([1.0, -1, 1, -1, 1])
    zeros = jnp.zeros(5)
    loss = losses.grpo(LossConfig(), delta, zeros, zeros, advantages, jnp.ones(5, bool), jnp.zeros(5, jnp.int32))
    out = losses.metrics(loss)
    assert float(out["clip_frac_high"]) == pytest.approx(0.2) and float(out["clip_frac_low"]) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(clip_low=0.0), "clip_low=0.0"),
        (dict(clip_low=1.5), "clip_low=1.5"),
        (dict(clip_high=-0.1), "clip_high=-0.1"),
        (dict(aggregation="mean"), "aggregation='mean' is unknown; choose one of token, sequence, constant"),
        (dict(aggregation="constant"), "constant_length=None with aggregation='constant'"),
        (dict(constant_length=5), "constant_length=5 with aggregation='token'"),
        (dict(aggregation="constant", constant_length=0), "constant_length=0"),
        (dict(entropy_coef=-1.0), "entropy_coef=-1.0"),
        (dict(entropy_coef=float("nan")), "entropy_coef=nan"),
    ],
)
def test_bad_configs_name_field_and_value(fields, message):
    with pytest.raises(ValueError) as error:
        LossConfig(**fields)
    assert message in str(error.value)
