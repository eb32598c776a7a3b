"""Reward models: the loss against numpy, learning a preference, honest confidence, and the way to disk and back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.learner import update
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.tokenizer import CharTokenizer
from adrl_jax.models.transformer import init_params
from adrl_jax.rewards import reward_model
from adrl_jax.types import Prompt

TOKENIZER = CharTokenizer("0123456789=")
CONFIG = ModelConfig("llama", TOKENIZER.size, 16, 32, 1, 2, 1, 8)


def fresh():
    return reward_model.from_policy(CONFIG, TOKENIZER, init_params(CONFIG, jax.random.key(0)), jax.random.key(1))


def test_bradley_terry_equals_numpy_in_value_and_gradient():
    rng = np.random.default_rng(0)
    owner, group = np.array([0] * 3 + [1] * 2 + [2] + [3] * 2 + [0] * 2), np.array([0] * 5 + [1] * 3 + [0] * 2)
    mask = np.arange(10) < 8
    signs = np.where(np.isin(owner, (0, 3)), 1.0, -1.0)
    after = rng.normal(size=10)

    def numpy_loss(s):
        margins = (s[2] - s[4], s[7] - s[5])
        return np.mean([np.log1p(np.exp(-m)) for m in margins])

    def ours(s):
        loss = reward_model.bradley_terry(s, *map(jnp.asarray, (signs, mask, owner, group)))
        return loss.numerator / loss.denominator, loss

    (value, loss), gradient = jax.value_and_grad(ours, has_aux=True)(jnp.asarray(after, jnp.float32))
    np.testing.assert_allclose(value, numpy_loss(after), rtol=1e-5)
    expected = [(numpy_loss(after + d) - numpy_loss(after - d)) / 2e-6 for d in np.eye(10) * 1e-6]
    np.testing.assert_allclose(gradient, expected, atol=1e-5)
    accuracy = np.mean([after[2] > after[4], after[7] > after[5]])
    assert float(loss.sums["mean/accuracy"] / loss.denominator) == pytest.approx(accuracy)


def pairs(rng, count):
    """Responses with more nines are better."""
    out = []
    for _ in range(count):
        prompt = rng.integers(0, 9, 3).astype(np.int32)
        good, bad = (np.append(rng.integers(0, 9, 4), TOKENIZER.eos_ids[0]).astype(np.int32) for _ in range(2))
        good[rng.integers(0, 4)] = 9
        out.append((prompt, good, bad))
    return out


def test_it_learns_what_is_preferred_and_comes_back_from_disk(tmp_path):
    rng = np.random.default_rng(0)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=5e-3))
    model = fresh()
    step = reward_model.make_reward_update(model.config, optimizer, update.data_mesh(1), microbatch_rows=4)
    state = update.init_state(model.params, optimizer)
    sizes = dict(row_length=32, row_multiple=8, target_multiple=32)
    for _ in range(60):
        state, metrics = step(state, reward_model.pairs_batch(pairs(rng, 16), **sizes))
    assert float(metrics["accuracy"]) > 0.9
    model = dataclasses.replace(model, params=state.params, record={"accuracy": 0.9})
    held_out = pairs(rng, 32)
    rewarder = reward_model.Rewarder(model, row_length=16, rows=8)
    margins = rewarder.values([p[:2] for p in held_out]) - rewarder.values([(p[0], p[2]) for p in held_out])
    assert reward_model.calibration(margins)["accuracy"] > 0.9
    reward_model.save(tmp_path, model)
    again = reward_model.load(tmp_path, CONFIG)
    assert again.record == {"accuracy": 0.9} and again.tokenizer.fingerprint() == TOKENIZER.fingerprint()
    texts = [(Prompt(0, TOKENIZER.encode("1="), "1="), "1929", False), (Prompt(0, TOKENIZER.encode("1="), "1="), "", True)]
    first, second = (reward_model.Rewarder(m, row_length=16, rows=8)(texts) for m in (model, again))
    np.testing.assert_allclose([s.value for s in first], [s.value for s in second], rtol=1e-6)
    direct = rewarder.values([(TOKENIZER.encode("1="), np.append(TOKENIZER.encode("1929"), TOKENIZER.eos_ids[0]))])
    np.testing.assert_allclose(first[0].value, direct[0], rtol=1e-5)
    with pytest.raises(ValueError, match=r"reward model of another size: hidden_size=16, here 32"):
        reward_model.load(tmp_path, dataclasses.replace(CONFIG, hidden_size=32))
    with pytest.raises(FileNotFoundError, match=r"experiments.reward_model writes it"):
        reward_model.load(tmp_path / "elsewhere")


def test_calibration_by_hand():
    honest = np.log(3.0)  # 3 of 4 right at confidence 3/4
    out = reward_model.calibration(np.array([honest, honest, honest, -honest]))
    assert out["accuracy"] == 0.75 and out["ece"] == pytest.approx(0.0, abs=1e-12)
    assert out["brier"] == pytest.approx(0.75 * 0.0625 + 0.25 * 0.5625)
    boastful = reward_model.calibration(np.array([9.0, 9.0, -9.0, -9.0]))
    assert boastful["ece"] > 0.49
    with pytest.raises(ValueError, match="no pairs"):
        reward_model.calibration(np.zeros(0))
