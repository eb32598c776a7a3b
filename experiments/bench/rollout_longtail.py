"""Workload `longtail`: 32 requests as 8 groups of 4, forced to 20 x 32, 8 x 96, 3 x 256 and 1 x 512 tokens.

`speedup_allowed` is what the latency table measured in this run allows at the acceptance reached in this run (see `ideal`);
`accept_length_needed` the accept length of depth-4 chains at which it would allow a speed-up of 1.7.
"""

import functools
import os
import random
import statistics
from typing import Any

import numpy as np

from adrl_jax import trace
from adrl_jax.bandit.beg import beg
from adrl_jax.bandit.goodput import goodput
from adrl_jax.models import weights
from adrl_jax.models.transformer import engine_layout
from adrl_jax.rollout import ties
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.tasks.gsm8k import Gsm8k
from adrl_jax.types import Prompt, Request, SamplingParams
from experiments.bench import form, ideal, sides, workload
from experiments.bench.peers import client
from experiments.bench.sides import SEED, Side, say

LENGTHS = [32] * 20 + [96] * 8 + [256] * 3 + [512]
MAX_PROMPT = 128
TARGET_SPEEDUP = 1.7  # TLT's
DRAFTED = (*(Strategy("eagle", d) for d in (1, 2, 3, 4, 6)), Strategy("eagle", 4, 1, 2))
LEARNING_RUNS = 2  # rollouts in which controllers learn before they are measured


def prompts(model: weights.Model, data: str | None, count: int) -> list[Prompt]:
    """The first GSM8K questions of at most 128 chat tokens; word problems of our own where there are no records."""
    if data is None:
        return workload.prompts(model.tokenizer, count, MAX_PROMPT)
    found = Gsm8k(data, instruction="").encode(model.tokenizer).prompts("train")
    short = (p for p in found if len(p.token_ids) <= MAX_PROMPT)
    return [p for p, _ in zip(short, range(count))]


def requests(model: weights.Model, data: str | None) -> list[Request]:
    lengths = LENGTHS.copy()
    random.Random(0).shuffle(lengths)
    return [
        Request(prompt, visit=0, sample=s, group_id=g, max_new_tokens=lengths[4 * g + s], forced_length=True)
        for g, prompt in enumerate(prompts(model, data, 8))
        for s in range(4)
    ]


def strategies(drafted: bool) -> tuple[Strategy, ...]:
    return (OFF, *DRAFTED) if drafted else (OFF, Strategy("ngram", 2), Strategy("ngram", 4))


def run(args) -> tuple[dict[str, Any], dict[str, str]]:
    """Results and notes."""
    model = sides.load(args.model)
    params = engine_layout(model.params, model.config)
    notes: dict[str, str] = {}
    found, drafter_params = sides.drafters(args.drafter, model, notes)
    arms = strategies(args.drafter is not None)
    work, sampling = requests(model, args.data), SamplingParams(temperature=args.temperature)
    engine = sides.make_engine(
        model,
        params,
        arms,
        found,
        drafter_params,
        max_batch=32,
        rounds_per_launch=args.rounds_per_launch,
        simulate_acceptance=args.simulate_acceptance,
    )
    ours = {strategy.name: sides.fixed_side(engine, work, sampling, arm) for arm, strategy in enumerate(arms)}
    ours["beg"] = Side(engine, work, sampling, beg(arms, sides.thresholds(arms)))
    ours["goodput"] = Side(engine, work, sampling, goodput(arms, engine.config.batches))
    for name, side in ours.items():
        say(name)
        side.until_compiled(most=LEARNING_RUNS + 2, least=LEARNING_RUNS if name in ("beg", "goodput") else 1)

    peers = _peers(args, model, work, notes)
    timed = {name: side.seconds for name, side in ours.items()}
    try:
        records = form.alternate({**timed, **{name: side for name, (_, side) in peers.items()}}, args.repeats, warmup=0)
    finally:
        for peer, _ in peers.values():
            peer.close()
    best = best_fixed(records, arms)
    rivals = dict.fromkeys(("off", best, "beg", "goodput"))
    pairs = form.alternate({name: timed[name] for name in rivals}, max(args.repeats, form.MIN_PAIRS), warmup=0)
    results = summary(records, pairs, best, ours, arms)
    results |= _ideal(ours, arms, engine.config.batches, work, pairs)
    if args.simulate_acceptance is None:
        compare = functools.partial(ties.compare, model.config, params, seed=SEED, valid_vocab=model.valid_vocab)
        plain = ours["off"].result.rollouts
        agreements = [compare(plain, side.result.rollouts) for name, side in ours.items() if name != "off"]
        results["identical_tokens"] = all(a.identical for a in agreements)
        results["tie_divergences"] = sum(a.tie_divergences for a in agreements)
    if args.table:
        write_table(args, [x for side in ours.values() for x in side.launches], arms)
    if args.trace:
        trace.write(args.trace, [ours["goodput"].result.stats])
    return results, notes


def write_table(args, launches, arms, requests: int = len(LENGTHS)) -> None:
    """What this run measured, for `experiments.bench.bandit`."""
    source = f"measured by experiments.bench.rollout --workload={args.workload} --model={args.model}, T={args.temperature}"
    world = {"requests": requests, "rounds_per_launch": args.rounds_per_launch}
    ideal.write_table(args.table, launches, arms, source=source, world=world)


def best_fixed(records, arms) -> str:
    """The arm, plain decoding among them, that took the least time throughout."""
    return min((s.name for s in arms), key=lambda name: form.median(records[name]))


def summary(records, pairs, best: str, ours: dict[str, Side], arms) -> dict[str, Any]:
    """Seconds from all sides in turn; ratios between rivals from the longer series of pairs."""
    seconds = {name: form.median(values) for name, values in records.items()}
    seconds |= {name: form.median(values) for name, values in pairs.items()}
    results: dict[str, Any] = {
        "plain_s": seconds["off"],
        "best_fixed_s": seconds[best],
        "best_fixed_arm": best,
        "beg_s": seconds["beg"],
        "goodput_s": seconds["goodput"],
        "hf_s": seconds.get("hf"),
        "llamacpp_s": seconds.get("llamacpp"),
        "fixed_s": {s.name: seconds[s.name] for s in arms},
        "tokens": sum(LENGTHS),
        "prefill_s": ours["off"].result.stats.prefill_seconds,
        "accept_length": ours["goodput"].accept_length,
        "accept_length_fixed": {s.name: ours[s.name].accept_length for s in arms if s.speculates},
        "goodput_arms": _arm_shares(ours["goodput"], arms),
        "host_gap_fraction": statistics.median(ours["goodput"].gaps),
    }
    results |= form.ratio(pairs["off"], pairs["goodput"]).results("goodput_over_plain")
    results |= form.ratio(pairs[best], pairs["goodput"]).results("goodput_over_best_fixed")
    results |= form.ratio(pairs["beg"], pairs["goodput"]).results("goodput_over_beg")
    for peer in ("hf", "llamacpp"):
        if peer in records:
            results |= form.ratio(records[peer], records["off"]).results(f"plain_over_{peer}")
    return results


def _arm_shares(side: Side, arms) -> dict[str, float]:
    """Share of the launches' seconds by strategy."""
    total = sum(x.seconds for x in side.launches)
    return {s.name: sum(x.seconds for x in side.launches if x.arm == arm) / total for arm, s in enumerate(arms)}


def _ideal(ours: dict[str, Side], arms, batches, work, records) -> dict[str, Any]:
    launches = [x for side in ours.values() for x in side.launches]
    table, chances = ideal.latencies(launches), ideal.acceptance(launches, arms)
    prompt = int(statistics.mean(len(r.prompt.token_ids) for r in work))
    prefill = ours["off"].result.stats.prefill_seconds
    decode = functools.partial(ideal.seconds, [r.max_new_tokens for r in work], prompt, arms, table)
    plain = prefill + decode(chances, batches, allowed=[0])
    best = prefill + decode(chances, batches)

    equal = [arm for arm, s in enumerate(arms) if not s.shares_slots]  # others would need a chance for each number of slots

    def ideal_of(chance: float) -> float:
        return prefill + decode({name: np.full(len(c), chance) for name, c in chances.items()}, batches, allowed=equal)

    allowed = plain / best
    reached = form.ratio(records["off"], records["goodput"]).median
    return {
        "speedup_allowed": allowed,
        "goodput_over_allowed": reached / allowed,
        "simulated_over_ideal": reached / allowed,
        "acceptance": {name: c.tolist() for name, c in chances.items()},
        "accept_length_needed": ideal.accept_length_needed(TARGET_SPEEDUP, plain, ideal_of, 4),
        "accept_length_4": {name: 1.0 + float(np.cumprod(c[:4]).sum()) for name, c in chances.items()},
        "seconds_per_round": ideal.by_arm(table, arms),
    }


def _peers(args, model, work, notes) -> dict[str, tuple[Any, Any]]:
    """Hugging Face with a static batch, whose finished rows stay until the longest is done; llama.cpp, whose rows leave."""
    found = {}
    for name in client.names(args.peer, ("hf", "llamacpp")):
        config = {"temperature": args.temperature, "seed": SEED, "threads": len(os.sched_getaffinity(0))}
        if name == "hf":
            config["model"], request = str(workload.hf_folder(model)), {"new_tokens": max(LENGTHS)}
        elif not str(model.source).endswith(".gguf"):
            notes[name] = f"llama.cpp reads GGUF files only; this model is {model.source}"
            continue
        else:
            config["gguf"], request = str(model.source), {"lengths": [r.max_new_tokens for r in work]}
        peer, reason = client.start(name, client.GENERATE[name], config, client.pythons(args.peer_python))
        if peer is None:
            notes[name] = reason
            continue
        request["prompts"] = [r.prompt.token_ids.tolist() for r in work]

        def side(peer=peer, request=request):
            return peer.run(**request, timeout=1800.0)["seconds"]

        found[name] = (peer, side)
    return found
