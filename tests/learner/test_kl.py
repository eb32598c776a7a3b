"""Estimators of the KL to the reference: their expected gradients by enumeration of a 5-token vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.learner import kl
from adrl_jax.learner.row import Row

RNG = np.random.default_rng(0)
LOGITS, REFERENCE, OTHER = (jnp.asarray(RNG.normal(size=5), jnp.float32) for _ in range(3))


def row(log_probs, behaviour):
    zeros = jnp.zeros(5, jnp.int32)
    reference = jax.nn.log_softmax(REFERENCE)
    return Row(log_probs, log_probs, behaviour, log_probs, zeros == 0, zeros, zeros, zeros, reference=reference)


def expected(estimator, correction, drawn_from):
    """Sum over the vocabulary of mu(token) times the term's value and gradient by the logits."""
    mu = jax.nn.log_softmax(drawn_from)

    def term(logits):
        return jnp.sum(jnp.exp(mu) * kl.penalty(row(jax.nn.log_softmax(logits), mu), estimator, correction))

    return jax.value_and_grad(term)(LOGITS)


def exact(first, second):
    p = jax.nn.log_softmax(first)
    return jnp.sum(jnp.exp(p) * (p - jax.nn.log_softmax(second)))


REVERSE = jax.value_and_grad(lambda x: exact(x, REFERENCE))(LOGITS)
FORWARD = jax.grad(lambda x: exact(REFERENCE, x))(LOGITS)


@pytest.mark.parametrize("drawn_from", [LOGITS, OTHER], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_corrected_forms_have_the_gradient_of_the_kl_wherever_tokens_came_from(estimator, drawn_from):
    value, gradient = expected(estimator, True, drawn_from)
    np.testing.assert_allclose(gradient, REVERSE[1], atol=1e-6)
    if estimator != "k2":  # half the square of k1 estimates the value only near the reference
        np.testing.assert_allclose(value, REVERSE[0], rtol=1e-5)


def test_what_the_uncorrected_forms_do_on_policy():
    np.testing.assert_allclose(expected("k1", False, LOGITS)[1], 0.0, atol=1e-6)
    np.testing.assert_allclose(expected("k2", False, LOGITS)[1], REVERSE[1], atol=1e-6)
    np.testing.assert_allclose(expected("k3", False, LOGITS)[1], FORWARD, atol=1e-6)
    for estimator in ("k1", "k3"):
        np.testing.assert_allclose(expected(estimator, False, LOGITS)[0], REVERSE[0], rtol=1e-5)


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_without_the_correction_other_data_mislead(estimator):
    assert np.abs(np.asarray(expected(estimator, False, OTHER)[1] - REVERSE[1])).max() > 1e-2


@pytest.mark.parametrize("estimator,correction", [("k2", False), ("k3", False), ("k1", True), ("k2", True), ("k3", True)])
def test_a_small_step_brings_the_policy_to_the_reference(estimator, correction):
    gradient = expected(estimator, correction, LOGITS)[1]
    assert exact(LOGITS - 0.05 * gradient, REFERENCE) < exact(LOGITS, REFERENCE)
