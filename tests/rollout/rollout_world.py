"""A tiny target with drafters of every kind, and engines that are built once: compiling is what these tests pay for."""

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.bandit.fixed import fixed
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import engine_layout, init_params
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.model import ModelDrafter
from adrl_jax.speculation.ngram import Ngram
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import Prompt, Request, SamplingParams

TARGET = ModelConfig("llama", 61, 32, 48, 2, 4, 2, 8, max_positions=256)
SMALL = ModelConfig("qwen2", 67, 16, 24, 1, 2, 2, 8, qkv_bias=True, max_positions=256)
EOS, VALID, SEED = (1, 5), 57, 11
DRAFTERS = {
    "ngram": Ngram(),
    "eagle": Eagle(TARGET),
    "model": ModelDrafter(SMALL, TARGET.vocab_size),
    "twin": ModelDrafter(TARGET, TARGET.vocab_size, name="twin"),
}
DEPTHS = (1, 3, 5)
STRATEGIES = (OFF, *(Strategy(name, depth) for name in DRAFTERS for depth in DEPTHS))


def target_params(seed=0):
    """Layers of small weight around a large embedding: text is neither constant nor uniform, and an eagle can guess it."""
    params = init_params(TARGET, jax.random.key(seed))
    params = jax.tree.map(lambda x: x * 4 if x.ndim == 2 else x, params)
    return engine_layout({**params, "embedding": params["embedding"] * 1.5}, TARGET)


def drafter_params(params, random=False):
    """The eagle passes the embedding of the last token on, scaled as the final norm would; a random one knows nothing."""
    wild = DRAFTERS["eagle"].init_params(jax.random.key(7))
    scale = 1 / jnp.sqrt(jnp.mean(jnp.square(params["embedding"])))
    kernel = jnp.concatenate([scale * jnp.eye(TARGET.hidden_size), jnp.zeros((TARGET.hidden_size,) * 2)])
    good = jax.tree.map(lambda x: x * 0.02 if x.ndim == 2 else x, wild)
    return {
        "eagle": jax.tree.map(lambda x: x * 20, wild) if random else {**good, "fc": {"kernel": kernel}},
        "model": engine_layout(DRAFTERS["model"].init_params(jax.random.key(8)), SMALL),
        "twin": params,
    }


class World:
    """Engines by their settings, and runs of them.

    `run` takes an arm as a strategy, or a list of strategies to be replayed launch by launch. The random eagle is the same
    program with other weights.
    """

    def __init__(self):
        self.params = target_params()
        self.drafter_params, self.random_drafter_params = drafter_params(self.params), drafter_params(self.params, random=True)
        self.engines = {}

    def engine(self, **settings):
        key = tuple(sorted(settings.items()))
        if key not in self.engines:
            names = dict(seed=SEED, eos_ids=EOS, valid_vocab=VALID, strategies=STRATEGIES, max_batch=8, batch_buckets=(8,))
            names |= dict(cache_bucket=128, rounds_per_launch=8) | settings
            self.engines[key] = Engine(TARGET, EngineConfig(**names), DRAFTERS)
        self.engines[key].publish(self.params, 3, self.drafter_params)
        return self.engines[key]

    def run(self, requests, temperature=1.0, arm=OFF, filters=None, random=False, **settings):
        engine = self.engine(**settings)
        if random:
            engine.publish(self.params, 3, self.random_drafter_params)
        sampling = SamplingParams(temperature, **(filters or {}))
        arms = engine.config.strategies
        if isinstance(arm, list):
            trace = [arms.index(a) for a in arm]
            return engine.generate(requests, sampling, fixed(0), fixed(0).init(), replay_arms=trace)
        bandit = fixed(arms.index(arm), len(arms))
        return engine.generate(requests, sampling, bandit, bandit.init())


def make_requests(forced=False, samples=2, budgets=(3, 30, 17, 1, 24), longest=20):
    """Prompts of 1 to `longest` tokens, budgets that end in different launches."""
    random = np.random.default_rng(4)
    lengths = (1, longest, 2, 9, 14)
    prompts = [Prompt(100 + i, random.integers(6, VALID, n)) for i, n in enumerate(lengths)]
    return [
        Request(prompt, visit=1, sample=s, group_id=i, max_new_tokens=budget + s, forced_length=forced)
        for i, (prompt, budget) in enumerate(zip(prompts, budgets))
        for s in range(samples)
    ]
