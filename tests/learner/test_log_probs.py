"""Chunked log-probs and entropies against the plain formula; no array of the whole vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.learner.log_probs import token_log_probs

U, H, V = 7, 16, 53


def problem(by_row):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(V, H)).astype(np.float32)
    params = {"embedding": jnp.array(matrix)} if by_row else {"embedding": jnp.zeros((V, H)), "head": jnp.array(matrix.T)}
    hidden = jnp.array(rng.normal(size=(U, H)).astype(np.float32)) * 2
    return params, hidden, jnp.array(rng.integers(0, 40, U)), jnp.array(rng.normal(size=(2, U)).astype(np.float32))


def plain(params, hidden, targets, temperature, valid):
    scores = hidden @ (params["head"] if "head" in params else params["embedding"].T) / temperature
    law = jax.nn.log_softmax(jnp.where(jnp.arange(V) < valid, scores, -jnp.inf), axis=-1)
    entropy = -jnp.sum(jnp.where(law > -jnp.inf, jnp.exp(law) * jnp.where(law > -jnp.inf, law, 0), 0), axis=-1)
    return law[jnp.arange(U), targets], entropy


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("block", [8, 16, 53, 1000, None])
@pytest.mark.parametrize("temperature,valid", [(1.0, V), (0.5, 41), (2.0, 40)])
def test_equals_the_plain_formula(by_row, block, temperature, valid):
    params, hidden, targets, g = problem(by_row)

    def ours(params, hidden):
        lp, ent = token_log_probs(
            params, hidden, targets, temperature, valid_vocab=valid, vocab_block=block, entropy_gradient=True
        )
        return jnp.sum(g[0] * lp + g[1] * ent), (lp, ent)

    def theirs(params, hidden):
        lp, ent = plain(params, hidden, targets, temperature, valid)
        return jnp.sum(g[0] * lp + g[1] * ent), (lp, ent)

    (_, values), gradients = jax.value_and_grad(ours, (0, 1), has_aux=True)(params, hidden)
    (_, expected), expected_gradients = jax.value_and_grad(theirs, (0, 1), has_aux=True)(params, hidden)
    for a, b in zip(jax.tree.leaves((values, gradients)), jax.tree.leaves((expected, expected_gradients)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b).max()))


def test_entropy_has_no_gradient_unless_asked_for():
    params, hidden, targets, _ = problem(True)
    gradient = jax.grad(lambda h: token_log_probs(params, h, targets, 1.0)[1].sum())(hidden)
    assert np.all(np.asarray(gradient) == 0)


def test_bfloat16_hidden_states_meet_a_float32_softmax():
    params, hidden, targets, _ = problem(True)
    rounded = hidden.astype(jnp.bfloat16)
    lp, ent = token_log_probs(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), rounded, targets, 1.0)
    assert lp.dtype == ent.dtype == jnp.float32
    exact = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    np.testing.assert_allclose(lp, plain(exact, rounded.astype(jnp.float32), targets, 1.0, V)[0], atol=1e-4)


def test_no_array_of_the_whole_vocabulary():
    params, hidden, targets, _ = problem(True)

    def loss(params, hidden):
        return token_log_probs(params, hidden, targets, 1.0, vocab_block=8, entropy_gradient=True)[0].sum()

    text = jax.jit(jax.grad(loss, (0, 1))).lower(params, hidden).as_text()
    assert f"tensor<{U}x8xf32>" in text and f"tensor<{U}x{V}xf32>" not in text


def test_extreme_logits_stay_finite():
    params = {"embedding": jnp.eye(4) * 1e4}
    lp, ent = token_log_probs(params, jnp.eye(4)[:2] * 10, jnp.array([0, 3]), 1.0, vocab_block=2)
    np.testing.assert_allclose(lp, [0.0, -1e5], rtol=1e-6)
    np.testing.assert_allclose(ent, 0.0, atol=1e-6)


def test_bad_arguments_are_refused():
    params, hidden, targets, _ = problem(True)
    with pytest.raises(ValueError, match="temperature=0"):
        token_log_probs(params, hidden, targets, 0.0)
    with pytest.raises(ValueError, match="valid_vocab=54 must be between 1 and the model's vocab_size=53"):
        token_log_probs(params, hidden, targets, 1.0, valid_vocab=54)


@pytest.mark.parametrize("by_row", [True, False])
def test_kernels_give_the_same(by_row):
    params, hidden, targets, _ = problem(by_row)
    ours = token_log_probs(params, hidden, targets, 0.7, valid_vocab=41, implementation="interpret")
    for x, y in zip(ours, token_log_probs(params, hidden, targets, 0.7, valid_vocab=41), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)
