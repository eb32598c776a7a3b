"""Workload `group`: GRPO groups of 8 on the arithmetic task at the beginning of the second epoch, no learned drafter anywhere.

A real run trains through its first epoch (64 prompts, 8 steps); then eight groups are drawn from its policy, 8 rows at a time,
plainly and with drafts from what the first epoch and finished siblings answered. Both give the same tokens.
"""

import functools
import pathlib
import tempfile
from typing import Any

from adrl_jax.rollout import ties
from adrl_jax.runtime import collect, loop
from adrl_jax.speculation.history_store import HistoryStore
from experiments import build, config, resolve
from experiments.bench import form, sides
from experiments.bench.sides import Side, say
from experiments.configs import smollm2_arithmetic

GROUPS, SIZE = 8, 8
STRATEGIES = ("off", "history-d1", "history-d2", "history-d3", "history-d5", "history-d4-v2", "history-d6-v2", "history-d6-v3")


def settings(args) -> config.Config:
    """The arithmetic experiment, one epoch of it."""
    c = smollm2_arithmetic.get_config()
    c.model.source = args.model
    c.train.steps = c.task.train_prompts // c.train.prompts_per_step
    c.train.group_size = SIZE
    c.task.eval_prompts, c.evaluation.every = 1, 0
    c.rollout.strategies = STRATEGIES
    c.rollout.max_batch, c.rollout.batch_buckets = SIZE, ()
    c.rollout.rounds_per_launch = 4
    c.drafter.history_reference, c.drafter.history_tokens = 512, 1 << 16
    c.log.compare_repeats, c.log.report, c.log.tensorboard = 0, False, False
    return config.freeze(c)


class SecondEpoch(Side):
    """Each call begins with the history that the first epoch left."""

    def __init__(self, *args: Any, make_history):
        super().__init__(*args)
        self.make_history = make_history

    def __call__(self) -> float:
        self.how["history"] = self.make_history()
        return super().__call__()


def run(args) -> tuple[dict[str, Any], dict[str, str]]:
    """Results and notes."""
    c = settings(args)
    limits = resolve.loop_config(c)
    with build.opened(c) as parts, tempfile.TemporaryDirectory() as folder:
        say(f"training through the first epoch: {c.train.steps} steps")
        loop.run(parts, limits, pathlib.Path(folder))
        saved = parts.history.state_dict()

        def make_history() -> HistoryStore:
            store = build.history_store(c)
            store.load_state_dict(saved)
            return store

        prompts = [parts.train_prompts[i] for i in range(GROUPS)]
        requests = collect.requests_for(prompts, [1] * GROUPS, SIZE, c.train.max_new_tokens)
        return _measure(args, parts, requests, limits.sampling, make_history, build.bandit(c))


def _measure(args, parts, requests, sampling, make_history, bandit) -> tuple[dict[str, Any], dict[str, str]]:
    engine, arms = parts.engine, parts.strategies
    ours = {
        "plain": sides.fixed_side(engine, requests, sampling, parts.off),
        "history": SecondEpoch(engine, requests, sampling, bandit, make_history=make_history),
    }
    fixed = {
        s.name: SecondEpoch(engine, requests, sampling, sides.fixed_bandit(engine, arm), make_history=make_history)
        for arm, s in enumerate(arms)
        if s.speculates
    }
    for name, side in (ours | fixed).items():
        say(name)
        side.until_compiled(least=3 if name == "history" else 1)
    pairs = form.alternate({name: side.seconds for name, side in ours.items()}, max(args.repeats, form.MIN_PAIRS), warmup=0)
    singles = form.alternate({name: side.seconds for name, side in fixed.items()}, args.repeats, warmup=0)
    params, seed = engine.params, engine.config.seed
    compare = functools.partial(ties.compare, parts.model_config, params, seed=seed, valid_vocab=engine.config.valid_vocab)
    plain = ours["plain"].result
    agreements = [compare(plain.rollouts, side.result.rollouts) for side in (ours | fixed).values()]
    lengths = [r.response_length for r in plain.rollouts]
    return {
        "plain_s": form.median(pairs["plain"]),
        "history_s": form.median(pairs["history"]),
        **form.ratio(pairs["plain"], pairs["history"]).results("history_over_plain"),
        "prefill_s": plain.stats.prefill_seconds,
        "fixed_s": {name: form.median(values) for name, values in singles.items()},
        "accept_length": ours["history"].accept_length,
        "accept_length_fixed": {name: side.accept_length for name, side in fixed.items()},
        "response_tokens": sum(lengths),
        "longest_response": max(lengths),
        "identical_tokens": all(a.identical for a in agreements),
        "tie_divergences": sum(a.tie_divergences for a in agreements),
    }, {}
