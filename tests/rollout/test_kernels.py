"""The engine with the accelerator kernels (interpreted) gives token for token what it gives with XLA."""

import dataclasses

import jax
import numpy as np
import pytest
import rollout_world
from adrl_kernels.choice import UnsupportedError

from adrl_jax.bandit.fixed import fixed
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.rollout.target import resolve
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.merged import Merged
from adrl_jax.speculation.ngram import Ngram
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import SamplingParams

TARGET = dataclasses.replace(rollout_world.TARGET, num_layers=1)
CHAIN, TREE = Strategy("eagle", 3), Strategy("eagle", 3, 2, 6)


class Runs:
    """Rollouts by (kernels, arm, temperature), each made when it is first asked for."""

    def __init__(self):
        self.requests = rollout_world.make_requests(samples=1)
        params = {k: v for k, v in rollout_world.target_params().items() if k != "layer_1"}
        self.engines, self.found = {}, {}
        for kernels in ("xla", "interpret"):
            config = EngineConfig(
                seed=11,
                eos_ids=rollout_world.EOS,
                valid_vocab=rollout_world.VALID,
                strategies=(OFF, CHAIN, TREE),
                max_batch=8,
                batch_buckets=(8,),
                cache_bucket=128,
                rounds_per_launch=8,
                kernels=kernels,
            )
            self.engines[kernels] = Engine(TARGET, config, {"eagle": Eagle(TARGET)})
            self.engines[kernels].publish(params, 3, rollout_world.drafter_params(params))

    def __call__(self, kernels, arm, temperature):
        engine, key = self.engines[kernels], (kernels, arm, temperature)
        if key not in self.found:
            bandit = fixed(engine.config.strategies.index(arm), 3)
            self.found[key] = engine.generate(self.requests, SamplingParams(temperature), bandit, bandit.init())
        return self.found[key]


@pytest.fixture(scope="module")
def results():
    return Runs()


@pytest.mark.parametrize("temperature", (1.0, 0.0))
@pytest.mark.parametrize("arm", (pytest.param(OFF, marks=pytest.mark.slow), CHAIN, TREE), ids=lambda s: s.name)
def test_interpreted_kernels_give_the_tokens_of_xla(results, arm, temperature):
    ours, plain = results("interpret", arm, temperature), results("xla", OFF, temperature)
    for a, b in zip(ours.rollouts, plain.rollouts, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=2e-5)
        assert a.finish_reason == b.finish_reason
    if arm != OFF:
        same = results("xla", arm, temperature)
        assert ours.stats.accept_length == same.stats.accept_length > 1.2


@pytest.mark.slow
def test_filtered_laws_take_whole_logits_and_the_same_tokens(world, requests_of):
    requests = requests_of(samples=1, budgets=(3, 6, 5, 1, 4))
    runs = [
        world.run(requests, filters={"top_k": 5}, kernels=kernels, strategies=(OFF,)).rollouts
        for kernels in ("xla", "interpret")
    ]
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)


def test_the_drafters_passes_use_the_engines_kernels():
    config = EngineConfig(0, (1,), strategies=(OFF, CHAIN), kernels="interpret")
    eagle = Eagle(TARGET)
    drafters = Engine(TARGET, config, {"eagle": eagle, "merged": Merged(Ngram(), eagle, 3), "ngram": Ngram()}).drafters
    assert drafters["eagle"].kernels == drafters["merged"].learned.kernels == "interpret"
    assert drafters["ngram"] == Ngram() and eagle.kernels == "xla"
    assert Engine(TARGET, dataclasses.replace(config, kernels="auto"), {"eagle": eagle}).drafters["eagle"] == eagle


def test_what_cannot_be_served_is_refused_before_anything_is_compiled(monkeypatch):
    target = TARGET
    with pytest.raises(ValueError, match=r"kernels='cuda'.*choose one of auto, xla, pallas_tpu, pallas_gpu, interpret"):
        EngineConfig(0, (1,), kernels="cuda")
    with pytest.raises(ValueError, match="kernels='pallas_tpu' needs a TPU, and JAX runs on cpu"):
        resolve("pallas_tpu", target, (OFF,), 8)
    odd = dataclasses.replace(target, head_dim=12)
    with pytest.raises(UnsupportedError, match="head size 12; multiples of 8"):
        resolve("interpret", odd, (OFF,), 8)
    with pytest.raises(UnsupportedError, match="71 nodes a row; 1 to 64"):
        resolve("interpret", target, (OFF, Strategy("ngram", 70)), 8)
    assert resolve("auto", target, (OFF,), 8) == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert resolve("auto", target, (OFF,), 8) == "pallas_tpu"
    assert resolve("auto", odd, (OFF,), 8) == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert resolve("auto", target, (OFF,), 8) == "xla"
    with pytest.raises(UnsupportedError, match="queries are float32; bfloat16 is supported"):
        resolve("pallas_gpu", target, (OFF,), 8)
