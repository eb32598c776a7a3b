"""Value and gradient against the plain formulas on a small vocabulary, whole or in part, in blocks or in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.drafter import law_loss as module
from adrl_jax.drafter.law_loss import law_loss

V, H, T = 41, 8, 0.7
RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.normal(size=(V, H)), jnp.float32)
IDS = np.array([0, 3, 4, 9, 17, 21, 30, 40])


def states(places, depths):
    draw = np.random.default_rng(places)
    return (jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((places, H), (depths, places, H)))


def plain(true, guess, ids, valid, token_weight, overlap_weight):
    """Both sums over `ids`; the policy's law is normalised over all valid ids, the drafter's over `ids`."""
    p = jax.nn.softmax((true @ TABLE.T)[:, :valid] / T)[:, ids]
    log_q = jax.nn.log_softmax((guess @ TABLE.T)[..., ids] / T)
    cross_entropy = -jnp.sum(p * log_q, axis=-1)
    overlap = jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)
    return token_weight * cross_entropy + overlap_weight * (1 - overlap), cross_entropy, overlap


def same(ours, true, guess, *rest):
    for a, b in zip(ours(guess), plain(true, guess, *rest), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=guess.shape[:2]), jnp.float32)
    objectives = (lambda g: jnp.sum(weight * ours(g).value), lambda g: jnp.sum(weight * plain(true, g, *rest)[0]))
    np.testing.assert_allclose(*(jax.jit(jax.grad(f))(guess) for f in objectives), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.3, 2.0)])
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("block", [8, 41, None])
def test_whole_vocabulary(weights, by_row, block):
    true, guess = states(5, 3)
    token_weight, overlap_weight = weights

    def ours(guess):
        return law_loss(
            TABLE if by_row else TABLE.T, true, guess, T, by_row=by_row, token_weight=token_weight,
            overlap_weight=overlap_weight, valid_vocab=33, vocab_block=block,
        )  # fmt: skip

    same(ours, true, guess, np.arange(33), 33, *weights)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.3, 2.0)])
@pytest.mark.parametrize("places", [5, 150])  # 150 are three chunks of 64
def test_draft_vocabulary(weights, places, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 64 * 2 * len(IDS))
    true, guess = states(places, 2)
    log_total = jax.nn.logsumexp(true @ TABLE.T / T, axis=-1)

    def ours(guess):
        return law_loss(TABLE[IDS], true, guess, T, token_weight=weights[0], overlap_weight=weights[1], log_total=log_total)

    same(ours, true, guess, IDS, V, *weights)


def test_nothing_but_the_drafter_has_a_gradient():
    true, guess = states(4, 1)
    total = lambda matrix, true: jnp.sum(law_loss(matrix, true, guess, T).value)  # noqa: E731
    for g in jax.grad(total, argnums=(0, 1))(TABLE, true):
        np.testing.assert_array_equal(g, 0.0)


def test_the_laws_agree_where_the_states_do():
    true, _ = states(4, 1)
    out = law_loss(TABLE, true, true[None], T)
    law = jax.nn.log_softmax(true @ TABLE.T / T)
    np.testing.assert_allclose(out.overlap[0], 1.0, rtol=1e-5)
    np.testing.assert_allclose(out.cross_entropy[0], -jnp.sum(jnp.exp(law) * law, axis=1), rtol=1e-5)
