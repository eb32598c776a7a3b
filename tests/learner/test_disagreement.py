"""The share of stored tokens that other weights would not choose with the same noise, against float64 position by position."""

import jax
import numpy as np
import pytest
from forward64 import all_logits

from adrl_jax.bandit.fixed import fixed
from adrl_jax.learner import disagreement, packing
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import engine_layout, init_params
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.sampling import noise
from adrl_jax.speculation.strategy import OFF
from adrl_jax.types import Prompt, Request, SamplingParams

TINY = ModelConfig("llama", 29, 16, 32, 1, 2, 1, 8)
VALID, SEED = 23, 5


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, init_params(TINY, jax.random.key(0)))


@pytest.fixture(scope="module")
def rollouts(params):
    prompts = [Prompt(i, np.random.default_rng(i).integers(2, VALID, 3 + 4 * i)) for i in range(3)]
    requests = [Request(p, 2, s, p.prompt_id, 12 + s, noise_visit=1 if s else None) for p in prompts for s in range(3)]
    engine = Engine(TINY, EngineConfig(SEED, (1,), VALID, (OFF,), max_batch=16, batch_buckets=(16,)))
    engine.publish(engine_layout(params, TINY), 0)
    return engine.generate(requests, SamplingParams(0.8), fixed(0), fixed(0).init()).rollouts


@pytest.mark.parametrize("layout", packing.LAYOUTS)
def test_against_float64_and_zero_for_the_policy_that_sampled(params, rollouts, layout):
    batch = packing.pack(rollouts, [0.0] * len(rollouts), row_length=96, layout=layout, row_multiple=4)
    measure = disagreement.make_measure(TINY, seed=SEED, temperature=0.8, valid_vocab=VALID)
    keys = jax.random.split(jax.random.key(3), len(jax.tree.leaves(params)))
    moved = jax.tree.unflatten(
        jax.tree.structure(params),
        [x + 0.05 * x.std() * jax.random.normal(k, x.shape) for x, k in zip(jax.tree.leaves(params), keys)],
    )
    used = np.flatnonzero(batch.target_mask.any(axis=1))
    for turn in range(len(used) + 1):
        assert measure(params, batch, rollouts, turn) == 0.0
    expected, served = {}, engine_layout(moved, TINY)
    for i, r in enumerate(rollouts):
        key = noise.request_keys(SEED, r.prompt_id, r.visit if r.noise_visit is None else r.noise_visit, r.sample)
        every = all_logits(TINY, served, r.token_ids, 48)[:, :VALID] / 0.8
        for place in range(r.prompt_length, len(r.token_ids)):
            logits = every[place - 1]
            u = (noise.bits(noise.position_keys(key, np.array([[place]]), noise.Role.TARGET)[0, 0], VALID) + 0.5) * 2.0**-32
            expected[i, place - r.prompt_length] = int(np.argmax(logits - np.log(-np.log1p(-u)))) != r.token_ids[place]
    seen = set()
    for turn, m in enumerate(used):
        owners = batch.rollout_index[m][batch.target_mask[m]]
        mine = [expected[key] for key in expected if key[0] in set(owners.tolist())]
        share = measure(moved, batch, rollouts, turn)
        assert share == pytest.approx(np.mean(mine), abs=1e-6)
        seen.add(share)
    assert 0 < np.mean(list(expected.values())) < 0.9 and max(seen) > 0


def test_an_empty_batch_has_no_share(params, rollouts):
    batch = packing.empty_batch(4, 96, 64)
    assert disagreement.make_measure(TINY, seed=0, temperature=1.0)(params, batch, rollouts, 0) is None
