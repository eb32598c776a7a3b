"""The engine's log-probs and the learner's are the same numbers: one law, two programs."""

import jax
import numpy as np
import pytest

from adrl_jax.bandit.fixed import fixed
from adrl_jax.learner import packing, update
from adrl_jax.learner.loss_config import LossConfig
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import engine_layout, init_params
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.speculation.ngram import Ngram
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import Prompt, Request, SamplingParams

TINY = ModelConfig("llama", 61, 32, 48, 2, 4, 2, 8)
VALID = 53


def generate(params, sampling, arm=0):
    prompts = [Prompt(i, np.random.default_rng(i).integers(2, VALID, 3 + 4 * i)) for i in range(3)]
    requests = [Request(p, 0, s, p.prompt_id, 10 + 3 * s) for p in prompts for s in range(3)]
    strategies = (OFF, Strategy("ngram", 3))
    config = EngineConfig(seed=0, eos_ids=(1,), valid_vocab=VALID, strategies=strategies, max_batch=16, batch_buckets=(16,))
    engine = Engine(TINY, config, {"ngram": Ngram()})
    engine.publish(engine_layout(params, TINY), 0)
    bandit = fixed(arm)
    return engine.generate(requests, sampling, bandit, bandit.init()).rollouts


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: x * 5 if x.ndim == 2 else x, init_params(TINY, jax.random.key(0)))


@pytest.mark.parametrize("temperature,arm", [(1.0, 0), (0.7, 0), (1.0, 1)])
@pytest.mark.parametrize("layout", packing.LAYOUTS)
def test_behaviour_log_probs_are_the_learners(params, temperature, arm, layout):
    rollouts = generate(params, SamplingParams(temperature=temperature), arm)
    batch = packing.pack(rollouts, [0.0] * len(rollouts), row_length=96, layout=layout, row_multiple=4)
    log_probs, _ = update.make_log_probs(TINY, temperature=temperature, valid_vocab=VALID)(params, batch)
    mask = batch.target_mask
    assert mask.sum() == sum(r.response_length for r in rollouts) > 60
    assert np.abs(np.asarray(log_probs) - batch.log_probs)[mask].max() < 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_canary_with_learning_rate_zero(params, temperature):
    rollouts = generate(params, SamplingParams(temperature=temperature))
    batch = packing.pack(rollouts, np.linspace(-1, 1, len(rollouts)), row_length=96, row_multiple=4)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.0))
    step = update.make_update(
        TINY,
        LossConfig(),
        optimizer,
        update.data_mesh(4),
        microbatch_rows=1,
        temperature=temperature,
        valid_vocab=VALID,
    )
    state = update.init_state(jax.tree.map(np.array, params), optimizer)
    for _ in range(2):
        state, metrics = step(state, batch)
        assert abs(float(metrics["weight_mean"]) - 1) < 1e-4
        assert float(metrics["clip_frac_high"]) == float(metrics["clip_frac_low"]) == 0
        assert 0 <= float(metrics["k3"]) < 1e-7
        assert float(metrics["max_abs_delta"]) < 1e-4


def test_a_wrong_temperature_shows(params):
    rollouts = generate(params, SamplingParams(temperature=0.7))
    batch = packing.pack(rollouts, [0.0] * len(rollouts), row_length=96, row_multiple=4)
    log_probs, _ = update.make_log_probs(TINY, temperature=1.0, valid_vocab=VALID)(params, batch)
    assert np.abs(np.asarray(log_probs) - batch.log_probs)[batch.target_mask].max() > 0.1
