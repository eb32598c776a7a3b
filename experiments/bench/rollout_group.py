"""Workload `group`: GRPO groups of 8 on the arithmetic task, second epoch, no learned drafter anywhere.

The first epoch fills the history; the second draws new samples of the same prompts, and each row's drafts come from what
its siblings and the epoch before answered. Responses end where they end.
"""

import functools
from typing import Any

from adrl_jax.bandit.goodput import goodput
from adrl_jax.models.transformer import engine_layout
from adrl_jax.rollout import ties
from adrl_jax.speculation.history import History
from adrl_jax.speculation.history_store import HistoryStore
from adrl_jax.speculation.ngram import Ngram
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.tasks.arithmetic import Arithmetic
from adrl_jax.types import Request, SamplingParams
from experiments.bench import form, sides
from experiments.bench.sides import SEED, Side, say

GROUPS, SIZE, BUDGET = 4, 8, 64
STRATEGIES = (OFF, *(Strategy("history", d) for d in (2, 4, 6)), Strategy("ngram", 3))


class SecondEpoch(Side):
    """Each call begins with the history of the first epoch, and is the second."""

    def __init__(self, *args: Any, first: list, **how: Any):
        super().__init__(*args, **how)
        self.first = first

    def __call__(self) -> float:
        store = HistoryStore()
        for rollout in self.first:
            store.add(rollout)
        self.how["history"] = store
        return super().__call__()


def run(args) -> tuple[dict[str, Any], dict[str, str]]:
    """Results and notes."""
    model = sides.load(args.model)
    params = engine_layout(model.params, model.config)
    prompts = Arithmetic().encode(model.tokenizer).prompts("train")
    sampling = SamplingParams(temperature=args.temperature)

    def epoch(visit: int) -> list[Request]:
        return [Request(prompts[g], visit, s, g, BUDGET) for g in range(GROUPS) for s in range(SIZE)]

    engine = sides.make_engine(
        model,
        params,
        STRATEGIES,
        {"history": History(1024), "ngram": Ngram()},
        {},
        max_batch=SIZE,
        rounds_per_launch=args.rounds_per_launch,
    )
    first = sides.fixed_side(engine, epoch(0), sampling, 0)
    first()
    rollouts = first.result.rollouts
    say(f"first epoch: {sum(r.response_length for r in rollouts)} tokens in {len(rollouts)} responses")
    plain = sides.fixed_side(engine, epoch(1), sampling, 0)
    ours = {
        "plain": plain,
        "history": SecondEpoch(engine, epoch(1), sampling, goodput(STRATEGIES, engine.config.batches), first=rollouts),
    }
    fixed = {
        s.name: SecondEpoch(engine, epoch(1), sampling, sides.fixed_bandit(engine, arm), first=rollouts)
        for arm, s in enumerate(STRATEGIES)
        if s.speculates
    }
    for name, side in (ours | fixed).items():
        say(name)
        side.until_compiled(least=4 if name == "history" else 1)
    pairs = form.alternate({name: side.seconds for name, side in ours.items()}, max(args.repeats, form.MIN_PAIRS), warmup=0)
    singles = form.alternate({name: side.seconds for name, side in fixed.items()}, args.repeats, warmup=0)
    compare = functools.partial(ties.compare, model.config, params, seed=SEED, valid_vocab=model.valid_vocab)
    agreements = [compare(plain.result.rollouts, side.result.rollouts) for side in (ours | fixed).values()]
    return {
        "plain_s": form.median(pairs["plain"]),
        "history_s": form.median(pairs["history"]),
        **form.ratio(pairs["plain"], pairs["history"]).results("history_over_plain"),
        "fixed_s": {name: form.median(values) for name, values in singles.items()},
        "accept_length": ours["history"].accept_length,
        "accept_length_fixed": {name: side.accept_length for name, side in fixed.items()},
        "response_tokens": sum(r.response_length for r in plain.result.rollouts),
        "identical_tokens": all(a.identical for a in agreements),
        "tie_divergences": sum(a.tie_divergences for a in agreements),
    }, {}
