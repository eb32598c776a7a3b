"""The sampling law against a plain numpy definition, and that `choose` draws exactly argmax(log p + g)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from adrl_jax.sampling import law, noise
from adrl_jax.sampling.law import Law
from adrl_jax.sampling.noise import Role
from adrl_jax.types import SamplingParams

log_law = jax.jit(law.log_law, static_argnums=2)
choose = jax.jit(law.choose, static_argnums=3)

FILTERS = [
    Law(),
    Law(top_k=3),
    Law(top_p=0.8),
    Law(min_p=0.05),
    Law(top_k=10, top_p=0.7, min_p=0.01),
    Law(top_p=0.9, valid_vocab=37),
    Law(top_k=1),
    Law(top_k=10_000),
    Law(top_p=1e-6),
]


def reference_law(logits, temperature, filters):
    """Probabilities in float64 by sorting, one row."""
    x = logits.astype(np.float64).copy()
    if filters.valid_vocab is not None:
        x[filters.valid_vocab :] = -np.inf
    if temperature == 0:
        p = np.zeros_like(x)
        p[np.argmax(x)] = 1
        return p
    x = (x - x.max()) / temperature
    p = np.exp(x) / np.exp(x).sum()
    order = np.argsort(-x, kind="stable")
    if filters.top_k:
        p[order[filters.top_k :]] = 0
        p /= p.sum()
    if filters.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= filters.top_p]] = 0
        p /= p.sum()
    if filters.min_p:
        p[p < filters.min_p * p.max()] = 0
        p /= p.sum()
    return p


def keys_for(batch, count, seed=0):
    names = noise.request_keys(seed, np.arange(batch), 0, 0)
    return noise.position_keys(jnp.asarray(names), jnp.tile(jnp.arange(count), (batch, 1)), Role.TARGET)


@pytest.mark.parametrize("vocab", [5, 1500])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_log_law_is_the_definition(vocab, filters):
    logits = np.random.default_rng(vocab).normal(size=(4, vocab)).astype(np.float32) * 3
    temperature = np.array([0.0, 0.3, 1.0, 2.5], np.float32)
    got = np.exp(np.asarray(log_law(logits, temperature, filters), np.float64))
    for row in range(4):
        expected = reference_law(logits[row], temperature[row], filters)
        np.testing.assert_array_equal(got[row] > 0, expected > 0)
        np.testing.assert_allclose(got[row], expected, rtol=2e-5, atol=1e-12)


def test_hand_values():
    np.testing.assert_allclose(log_law(jnp.array([2.0, 0.0, -1.0]), 1.0, Law())[0], -0.1698, atol=1e-4)
    p = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    np.testing.assert_allclose(jnp.exp(log_law(p, 1.0, Law(top_k=2))), [0.625, 0.375, 0], atol=1e-6)
    np.testing.assert_allclose(jnp.exp(log_law(p, 1.0, Law(top_p=0.6))), [0.625, 0.375, 0], atol=1e-6)
    np.testing.assert_allclose(jnp.exp(log_law(p, 1.0, Law(min_p=0.5))), [0.625, 0.375, 0], atol=1e-6)
    # Order matters: the temperature first. At T = 0.5 the law is [.66, .24, .11] and top-p 0.6 keeps one id only.
    np.testing.assert_allclose(jnp.exp(log_law(p, 0.5, Law(top_p=0.6))), [1, 0, 0], atol=1e-6)
    # Top-p counts the mass that top-k left: [.625, .375], so 0.6 keeps one.
    np.testing.assert_allclose(jnp.exp(log_law(p, 1.0, Law(top_k=2, top_p=0.6))), [1, 0, 0], atol=1e-6)


def test_equal_logits_are_kept_from_the_lowest_id_on():
    flat = jnp.zeros(10)
    np.testing.assert_array_equal(jnp.exp(log_law(flat, 1.0, Law(top_k=3))) > 0, np.arange(10) < 3)
    np.testing.assert_array_equal(jnp.exp(log_law(flat, 1.0, Law(top_p=0.35))) > 0, np.arange(10) < 4)
    np.testing.assert_allclose(jnp.exp(log_law(flat, 0.0, Law())), np.arange(10) == 0)
    tied = jnp.array([0.0, 3.0, 1.0, 3.0, 1.0, 1.0])
    np.testing.assert_array_equal(log_law(tied, 1.0, Law(top_k=4)) > -jnp.inf, [False, True, True, True, True, False])


def test_temperature_zero_is_argmax_row_by_row():
    logits = jnp.tile(jnp.array([1.0, 2.0]), (3, 1, 1))
    tokens, log_probs = choose(logits, jnp.array([0.0, 1.0, 0.0]), keys_for(3, 1), Law())
    assert tokens[0, 0] == tokens[2, 0] == 1
    assert log_probs[0, 0] == log_probs[2, 0] == 0
    np.testing.assert_allclose(log_probs[1, 0], jax.nn.log_softmax(jnp.array([1.0, 2.0]))[tokens[1, 0]], atol=1e-6)
    # The lowest of equal logits, wherever it lies in a large vocabulary, also in low precision.
    many = np.zeros((1, 1, 5000), np.float32)
    many[..., [4100, 777, 903]] = 8.0
    assert choose(jnp.asarray(many, jnp.bfloat16), jnp.zeros(1), keys_for(1, 1), Law())[0] == 777


@pytest.mark.parametrize("filters", [Law(), Law(valid_vocab=4), Law(top_k=4), Law(top_p=0.6), Law(min_p=0.1)], ids=str)
@pytest.mark.parametrize("vocab", [127, 1500])
def test_choose_is_argmax_of_log_law_plus_gumbel(vocab, filters):
    batch, count = 3, 16
    logits = jax.random.normal(jax.random.key(vocab), (batch, count, vocab)) * 4
    temperature, keys = jnp.array([0.5, 1.0, 1.7]), keys_for(batch, count, seed=vocab)
    check_choice(logits, temperature, keys, filters)


def test_choose_at_the_size_of_a_real_vocabulary():
    logits = jax.random.normal(jax.random.key(0), (2, 8, 49152)) * 4
    check_choice(logits, jnp.array([0.6, 1.0]), keys_for(2, 8, seed=1), Law(valid_vocab=49000))


def check_choice(logits, temperature, keys, filters):
    vocab, count = logits.shape[-1], logits.shape[1]
    tokens, log_probs = choose(logits, temperature, keys, filters)
    u = (noise.bits(np.asarray(keys), vocab).astype(np.float64) + 0.5) * 2.0**-32
    log_p = np.asarray(log_law(logits, jnp.tile(temperature[:, None], (1, count)), filters), np.float64)
    scores = log_p - np.log(-np.log1p(-u))
    chosen = np.take_along_axis(scores, np.asarray(tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(chosen, scores.max(-1), atol=1e-5)
    assert np.mean(np.asarray(tokens) == scores.argmax(-1)) == 1.0
    np.testing.assert_allclose(log_probs, np.take_along_axis(log_p, np.asarray(tokens)[..., None], -1)[..., 0], atol=1e-5)


def test_log_probs_are_log_softmax_at_the_temperature():
    logits = jax.random.normal(jax.random.key(1), (2, 4, 49152)) * 6
    temperature = jnp.array([0.7, 1.3])
    tokens, log_probs = choose(logits, temperature, keys_for(2, 4), Law())
    expected = jax.nn.log_softmax(logits / temperature[:, None, None])
    np.testing.assert_allclose(log_probs, jnp.take_along_axis(expected, tokens[..., None], -1)[..., 0], atol=1e-5)


@pytest.mark.parametrize("filters", [Law(), Law(top_k=3), Law(valid_vocab=5)], ids=str)
def test_draws_have_the_law(filters):
    logits = jnp.array([0.3, -1.0, 1.2, 0.0, -0.4, 5.0])[None, None, [0, 1, 2, 3, 4, 5]]
    draws = 20_000
    tokens, _ = choose(jnp.tile(logits, (1, draws, 1)), jnp.array([0.8]), keys_for(1, draws), filters)
    expected = reference_law(np.asarray(logits)[0, 0], 0.8, filters) * draws
    counts = np.bincount(np.asarray(tokens)[0], minlength=6)
    assert not counts[expected == 0].any()
    assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_a_fair_coin_is_fair_on_every_path():
    for filters in (Law(), Law(top_k=2), Law(top_p=0.999), Law(valid_vocab=2)):
        logits = jnp.tile(jnp.array([0.0, 0.0, -30.0]), (1, 10_000, 1))
        tokens, _ = choose(logits, jnp.ones(1), keys_for(1, 10_000, seed=9), filters)
        assert abs(float(jnp.mean(tokens)) - 0.5) < 0.015


def test_ids_past_the_tokenizer_are_never_drawn():
    logits = jnp.zeros((4, 200, 8)).at[..., 6].set(20.0)
    filters = Law(valid_vocab=5)
    tokens, log_probs = choose(logits, jnp.array([0.0, 0.5, 1.0, 50.0]), keys_for(4, 200), filters)
    assert int(tokens.max()) < 5 and bool(jnp.isfinite(log_probs).all())
    p = jnp.exp(log_law(logits, jnp.ones((4, 200)), filters))
    assert not p[..., 5:].any()
    np.testing.assert_allclose(p[..., :5], 0.2, atol=1e-6)


def test_a_row_does_not_depend_on_its_batch():
    logits = jax.random.normal(jax.random.key(2), (6, 3, 2048)) * 3
    temperature, keys = jnp.array([0.0, 0.4, 1.0, 1.0, 2.0, 0.9]), keys_for(6, 3)
    tokens, log_probs = choose(logits, temperature, keys, Law())
    order = jnp.array([4, 2, 0, 5])
    again, log_again = choose(logits[order], temperature[order], keys[order], Law())
    np.testing.assert_array_equal(tokens[order], again)
    np.testing.assert_allclose(log_probs[order], log_again, atol=1e-6)
    one, _ = choose(logits[3:4, 1:2], temperature[3:4], keys[3:4, 1:2], Law())
    assert one[0, 0] == tokens[3, 1]


def test_extreme_temperatures_and_logits_stay_finite():
    logits = jnp.array([[[1e4, -1e4, 3.0, 1e4 - 1]]] * 3)
    tokens, log_probs = choose(logits, jnp.array([1e-6, 1.0, 1e6]), keys_for(3, 1), Law())
    assert bool(jnp.isfinite(log_probs).all()) and tokens[0, 0] == 0
    np.testing.assert_allclose(log_probs[2, 0], -np.log(4), atol=0.02)


@pytest.mark.parametrize("wrong", [{"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 1.0}, {"valid_vocab": 0}])
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Law(**wrong)


def test_law_of_sampling_params():
    made = Law.of(SamplingParams(temperature=0.5, top_k=4, top_p=0.9), valid_vocab=100)
    assert made == Law(4, 0.9, 0.0, 100) and made.filtered and not Law(valid_vocab=3).filtered
