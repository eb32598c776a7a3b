"""Workload `tree`: chains, trees and shared slots at equal verify tokens, at two temperatures; trees rejection-sampled too.

`…_accept_length` are tokens a pass by temperature and verify tokens; the main entries are means over both. Seconds are not
compared: a tree's worth depends on what a wider pass costs on the machine at hand.
"""

import functools
import statistics
from typing import Any

from adrl_jax.models.transformer import engine_layout
from adrl_jax.rollout import ties
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import Request, SamplingParams
from experiments.bench import sides
from experiments.bench.rollout_longtail import prompts
from experiments.bench.sides import SEED, say

TEMPERATURES = (1.0, 0.7)
# Chains of 3 and 6 drafts, trees of as many verify tokens, and longer chains whose rows share as many.
CHAINS = (Strategy("eagle", 3), Strategy("eagle", 6))
TREES = (Strategy("eagle", 3, 2, 4), Strategy("eagle", 5, 3, 7))
SHARED = (Strategy("eagle", 5, 1, 4), Strategy("eagle", 8, 1, 7))
PROMPTS, SAMPLES, TOKENS = 8, 2, 96


def run(args) -> tuple[dict[str, Any], dict[str, str]]:
    """Results and notes."""
    if args.drafter is None:
        raise SystemExit("--workload=tree needs --drafter, a folder that experiments.drafter_warmup wrote")
    model = sides.load(args.model)
    params = engine_layout(model.params, model.config)
    notes: dict[str, str] = {}
    found, drafter_params = sides.drafters(args.drafter, model, notes)
    work = [
        Request(p, 0, s, p.prompt_id, TOKENS, forced_length=True)
        for p in prompts(model, args.data, PROMPTS)
        for s in range(SAMPLES)
    ]
    lengths: dict[str, dict[str, dict[str, float]]] = {}
    seconds: dict[str, dict[str, float]] = {}
    agreements = []
    compare = functools.partial(ties.compare, model.config, params, seed=SEED, valid_vocab=model.valid_vocab)
    for verification in ("coupled", "rejection"):
        arms = (OFF, *CHAINS, *TREES, *SHARED) if verification == "coupled" else (OFF, *TREES)
        engine = sides.make_engine(
            model,
            params,
            arms,
            found,
            drafter_params,
            max_batch=len(work),
            batch_buckets=(len(work),),
            cache_bucket=128,
            rounds_per_launch=args.rounds_per_launch,
            verification=verification,
        )
        for temperature in TEMPERATURES:
            plain = None
            for arm, strategy in enumerate(arms):
                side = sides.fixed_side(engine, work, SamplingParams(temperature=temperature), arm)
                side()
                rollouts = side.result.rollouts
                plain = rollouts if plain is None else plain
                if not strategy.speculates:
                    continue
                if verification == "coupled":
                    agreements.append(compare(plain, rollouts))
                kind = "tree" if strategy.width > 1 else "shared" if strategy.shares_slots else "chain"
                kind = kind if verification == "coupled" else f"{kind}_rejection"
                by_size = lengths.setdefault(kind, {}).setdefault(str(temperature), {})
                by_size[str(strategy.verify_tokens)] = side.accept_length
                seconds.setdefault(f"{strategy.name}, {verification}", {})[str(temperature)] = side.step_seconds
                say(f"{strategy.name}, {verification}, T={temperature}: accept length {side.accept_length:.3f}")
    results: dict[str, Any] = {f"{kind}_accept_length": _mean(found) for kind, found in lengths.items()}
    chain, tree, rejection = (lengths[k] for k in ("chain", "tree", "tree_rejection"))
    cells = [(t, v) for t in chain for v in chain[t]]
    return results | {
        "accept_length_by_temperature_and_verify_tokens": lengths,
        "shared_over_equal_least": min(lengths["shared"][t][v] / chain[t][v] for t, v in cells),
        "tree_over_chain_least": min(tree[t][v] / chain[t][v] for t, v in cells),
        "coupled_over_rejection_least": min(tree[t][v] / rejection[t][v] for t, v in cells),
        "seconds_per_round": seconds,
        "identical_tokens": all(a.identical for a in agreements),
        "tie_divergences": sum(a.tie_divergences for a in agreements),
    }, notes


def _mean(found: dict[str, dict[str, float]]) -> float:
    return statistics.mean(x for by_size in found.values() for x in by_size.values())
