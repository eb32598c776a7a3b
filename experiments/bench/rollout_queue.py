"""Workload `queue`: 1,000 and 10,000 short requests over 16 rows of a tiny model: does the queue scale, does memory stay flat?"""

import statistics
from typing import Any

import jax
import numpy as np

from adrl_jax.bandit.fixed import fixed
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import engine_layout, init_params
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.types import Prompt, Request, SamplingParams
from experiments.bench import form
from experiments.bench.sides import SEED, say

TINY = ModelConfig("llama", 128, 32, 64, 2, 4, 2, 8, max_positions=256)
COUNTS = (1_000, 10_000)
ROWS, GROUP = 16, 4


def requests(count: int) -> list[Request]:
    """Groups of 4 with prompts of 8 to 31 tokens and budgets of 4 to 15."""
    random = np.random.default_rng(0)
    prompts = [Prompt(i, random.integers(3, 128, random.integers(8, 32))) for i in range(count // GROUP)]
    return [Request(p, 0, s, p.prompt_id, int(4 + (p.prompt_id + s) % 12)) for p in prompts for s in range(GROUP)]


def run(args) -> tuple[dict[str, Any], dict[str, str]]:
    """Results and notes."""
    config = EngineConfig(SEED, (1,), max_batch=ROWS, batch_buckets=(4, ROWS), rounds_per_launch=args.rounds_per_launch)
    engine = Engine(TINY, config)
    engine.publish(engine_layout(init_params(TINY, jax.random.key(SEED)), TINY), 0)
    sampling, bandit = SamplingParams(1.0), fixed(0, 1)
    work = {count: requests(count) for count in COUNTS}
    resident: list[float] = []

    def side(count: int):
        def one() -> float:
            stats = engine.generate(work[count], sampling, bandit, bandit.init()).stats
            resident.append(form.rss_mb())
            return (stats.seconds - stats.compile_seconds) / count

        return one

    for count in COUNTS:
        side(count)()
    resident.clear()
    records = form.alternate({str(count): side(count) for count in COUNTS}, max(args.repeats, form.MIN_PAIRS), warmup=1)
    few, many = (records[str(count)] for count in COUNTS)
    say(f"{statistics.median(many) * 1e6:.0f} us a request, resident {resident[0]:.0f} to {resident[-1]:.0f} MB")
    return {
        **form.ratio(many, few).results("per_request_ratio_10k_1k"),
        "us_per_request_1k": 1e6 * form.median(few),
        "us_per_request_10k": 1e6 * form.median(many),
        "rss_growth_mb": resident[-1] - resident[0],
        "programs": len(engine.programs),
    }, {}
