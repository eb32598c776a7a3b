"""Norms against float64 numpy, their derivatives against those that JAX derives from the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.models.norm import Norm, normalize


def plain(centered, eps, x, weight, bias):
    y = x - x.mean(-1, keepdims=True) if centered else x
    y = y / jnp.sqrt((y**2).mean(-1, keepdims=True) + eps) * weight
    return y if bias is None else y + bias


@pytest.fixture
def case(request):
    rng = np.random.default_rng(0)
    x, d_out = rng.normal(size=(2, 3, 5, 24)) * np.array([3.0, 0.1]).reshape(2, 1, 1, 1, 1) + 0.5
    return x, d_out, rng.normal(size=24) + 1, rng.normal(size=24)


@pytest.mark.parametrize("centered,with_bias", [(False, False), (True, True), (True, False), (False, True)])
def test_value_and_derivative(case, centered, with_bias):
    x, d_out, weight, bias = (jnp.asarray(a, jnp.float32) for a in case)
    bias = bias if with_bias else None
    value, pull = jax.vjp(lambda *a: normalize(centered, 1e-5, *a), x, weight, bias)
    expected, plain_pull = jax.vjp(lambda *a: plain(centered, 1e-5, *a), x, weight, bias)
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-5)
    for got, want in zip(jax.tree.leaves(pull(d_out)), jax.tree.leaves(plain_pull(d_out)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_bfloat16_is_normalised_in_float32(case, kind):
    x = jnp.asarray(case[0], jnp.bfloat16)
    norm = Norm(kind, offset=1.0)
    params = norm.init(jax.random.key(0), x)
    got = norm.apply(params, x)
    exact = plain(kind == "layer", 1e-5, np.asarray(x, np.float64), 1.0, None)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(exact), rtol=2**-8, atol=2**-8)
    assert jax.grad(lambda x: norm.apply(params, x).astype(jnp.float32).sum())(x).dtype == jnp.bfloat16
