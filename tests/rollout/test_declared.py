"""Programs are those that the settings declare, and a second rollout of the same sizes compiles none."""

import numpy as np
import pytest
from rollout_world import DRAFTERS, EOS, SEED, TARGET, VALID

from adrl_jax.bandit.goodput import goodput
from adrl_jax.rollout import declared
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.sampling.law import Law
from adrl_jax.speculation.history import History
from adrl_jax.speculation.history_store import HistoryStore
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import Prompt, Request, SamplingParams

STRATEGIES = (OFF, Strategy("eagle", 1), Strategy("eagle", 3), Strategy("history", 2))


def requests(count, seed, longest_prompt, longest):
    random = np.random.default_rng(seed)
    prompts = [Prompt(i, random.integers(6, VALID, random.integers(1, longest_prompt + 1))) for i in range(count)]
    budget = lambda p: int(random.integers(1, longest - len(p.token_ids) + 1))  # noqa: E731
    return [Request(p, 0, s, p.prompt_id, budget(p)) for p in prompts for s in range(2)]


@pytest.mark.parametrize("chunk", [None, 16])
def test_every_program_was_declared(world, chunk):
    longest, longest_prompt = 90, 40
    config = EngineConfig(
        SEED, EOS, VALID, STRATEGIES, max_batch=6, batch_buckets=(2, 6), cache_bucket=32, rounds_per_launch=4,
        prefill_bucket=16, prefill_chunk=chunk, max_length=longest,
    )  # fmt: skip
    drafters = {"eagle": DRAFTERS["eagle"], "history": History(64)}
    engine = Engine(TARGET, config, drafters)
    engine.publish(world.params, 0, {"eagle": world.drafter_params["eagle"]})
    sampling, bandit = SamplingParams(0.8), goodput(STRATEGIES, config.batches)
    state, store = bandit.init(), HistoryStore()
    known = declared.programs(config, longest, longest_prompt, drafters, Law.of(sampling, VALID))
    legal = set().union(*known.values())
    for seed in range(3):
        work = requests(5, seed, longest_prompt, longest)
        state = engine.generate(work, sampling, bandit, state, history=store).bandit_state
        unknown = [key for key in engine.programs.keys() if key not in legal]
        assert not unknown
    used = {key[0] for key in engine.programs.keys()}
    assert {"prefill", "empty", "admit", "reshape", "launch"} <= used and (chunk is None or "continue_prefill" in used)
    # Steady state: the same work once more, with the same arms, needs nothing new.
    stats = engine.generate(work, sampling, bandit, state, history=store, replay_arms=[1, 2, 3, 0] * 100).stats
    again = engine.generate(work, sampling, bandit, state, history=store, replay_arms=[1, 2, 3, 0] * 100).stats
    assert again.compile_seconds == 0 and again.programs == stats.programs


def test_the_declared_launches_are_arms_times_sizes():
    config = EngineConfig(SEED, EOS, VALID, STRATEGIES, max_batch=6, batch_buckets=(2, 6), cache_bucket=32, max_length=90)
    assert declared.capacities(config, 90) == (32, 64, 96)
    known = declared.programs(config, 90, 40, {}, Law())
    assert len(known["launch"]) == len(STRATEGIES) * 2 * 3
