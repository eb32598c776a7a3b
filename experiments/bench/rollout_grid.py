"""Workload `grid`: batches of 1, 2, 4, 8, 16 and 32 equal requests of 64 tokens; every strategy, and goodput choosing.

`adaptive_over_best` is goodput's speed over that of the best strategy of its row, judged on interleaved pairs;
`adaptive_over_plain` the same over plain decoding; `draft_share` what drafting takes of a round. `--json` also carries the
latency table and the acceptance; `--table=FILE` writes them as `experiments.bench.bandit --tables` reads them.
"""

from typing import Any

from adrl_jax.bandit.goodput import goodput
from adrl_jax.models.transformer import engine_layout
from adrl_jax.types import Request, SamplingParams
from experiments.bench import draft_share, form, ideal, sides
from experiments.bench.rollout_longtail import prompts, strategies, write_table
from experiments.bench.sides import Side, say

BATCHES = (1, 2, 4, 8, 16, 32)
TOKENS = 64
SHARES_AT = (1, 4, 16)  # batches at which the drafter's part of a round is timed


def run(args) -> tuple[dict[str, Any], dict[str, str]]:
    """Results and notes."""
    model = sides.load(args.model)
    params = engine_layout(model.params, model.config)
    notes: dict[str, str] = {}
    found, drafter_params = sides.drafters(args.drafter, model, notes)
    arms = strategies(args.drafter is not None)
    sampling = SamplingParams(temperature=args.temperature)
    engine = sides.make_engine(
        model,
        params,
        arms,
        found,
        drafter_params,
        max_batch=max(BATCHES),
        rounds_per_launch=args.rounds_per_launch,
    )
    questions = prompts(model, args.data, 8)
    results: dict[str, Any] = {"cells": [], "adaptive_over_best": [], "adaptive_over_plain": [], "best_arm": []}
    launches = []
    for batch in BATCHES:
        work = [
            Request(questions[i % len(questions)], 0, i // len(questions), i % len(questions), TOKENS, forced_length=True)
            for i in range(batch)
        ]
        ours = {s.name: sides.fixed_side(engine, work, sampling, arm) for arm, s in enumerate(arms)}
        ours["goodput"] = Side(engine, work, sampling, goodput(arms, engine.config.batches))
        for name, side in ours.items():
            side.until_compiled(least=4 if name == "goodput" else 1)
        records = form.alternate(dict(ours), args.repeats, warmup=0)
        speeds = {name: form.median(values) for name, values in records.items()}
        best = max((s.name for s in arms), key=speeds.__getitem__)
        pairs = form.alternate({name: ours[name] for name in dict.fromkeys((best, "off", "goodput"))}, form.MIN_PAIRS, warmup=0)
        for name in (*(s.name for s in arms), "goodput"):
            cell = {"batch": batch, "arm": name, "tokens_per_s": speeds[name], "accept_length": ours[name].accept_length}
            results["cells"].append(cell)
        over_best, over_plain = (form.ratio(pairs["goodput"], pairs[name]) for name in (best, "off"))
        results["adaptive_over_best"].append(over_best.median)
        results["adaptive_over_plain"].append(over_plain.median)
        results["best_arm"].append(best)
        results |= over_best.results(f"adaptive_over_best_{batch}") | over_plain.results(f"adaptive_over_plain_{batch}")
        launches += [x for side in ours.values() for x in side.launches]
        say(f"batch {batch}: " + ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items()) + " tokens/s")
    results["seconds_per_round"] = ideal.by_arm(ideal.latencies(launches), arms)
    results["acceptance"] = {name: c.tolist() for name, c in ideal.acceptance(launches, arms).items()}
    learned = [s for s in arms if s.drafter in drafter_params]
    results["draft_share"] = draft_share.shares(engine, learned, SHARES_AT)
    if args.table:
        write_table(args, launches, arms, max(BATCHES))
    print(table(results["cells"]))
    return results, notes


def table(cells: list[dict[str, Any]]) -> str:
    """Speed-ups over plain decoding by batch, as TLT's Table 4: one row a strategy."""
    names = list(dict.fromkeys(c["arm"] for c in cells))
    speed = {(c["batch"], c["arm"]): c["tokens_per_s"] for c in cells}
    batches = sorted({c["batch"] for c in cells})
    width = max(map(len, names))
    lines = [f"{'batch':<{width}}" + "".join(f"{b:>8}" for b in batches)]
    for name in names:
        lines.append(f"{name:<{width}}" + "".join(f"{speed[b, name] / speed[b, 'off']:>7.2f}x" for b in batches))
    return "\n".join(lines)
