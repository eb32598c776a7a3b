"""Rules between fields of a training config. Each names the field to change, its value, and what would be legal."""

import itertools
import re
from pathlib import Path
from typing import Any

from adrl_jax.speculation.strategy import OFF, Strategy
from experiments import devices, learner_rules
from experiments.schema import ConfigError, require

DRAFTERS = ("ngram", "history", "eagle", "eagle3", "merged", "model")
TREE_DRAFTERS = ("eagle", "eagle3")
LEARNED = ("eagle", "eagle3", "merged")  # strategies that draft with the trained drafter
NEEDS_PATH = ("gsm8k",)
HAS_WORKED_EXAMPLES = ("division", "arithmetic", "gsm8k")


_STRATEGY = re.compile(r"(?P<drafter>\w+)-d(?P<depth>\d+)((-w(?P<width>\d+))?-v(?P<verify>\d+))?")


def parse_strategy(text: str, field: str = "rollout.strategies") -> Strategy:
    """`off`, `<drafter>-d<depth>`, one with shared slots, `<drafter>-d<depth>-v<verify tokens>`, or a tree,
    `<drafter>-d<depth>-w<width>-v<verify tokens>`, as a `Strategy`.

    Raises:
        ConfigError: anything else.
    """
    if text == OFF.name:
        return OFF
    parts = _STRATEGY.fullmatch(text)
    if parts is None or parts["drafter"] not in DRAFTERS or int(parts["depth"]) < 1:
        raise ConfigError(
            f"{field}={text!r} is not legal: write off, <drafter>-d<depth>, <drafter>-d<depth>-v<verify tokens> or "
            f"<drafter>-d<depth>-w<width>-v<verify tokens>, drafter one of {', '.join(DRAFTERS)}"
        )
    width, verify = int(parts["width"] or 1), parts["verify"] and int(parts["verify"])
    if width > 1 and parts["drafter"] not in TREE_DRAFTERS:
        raise ConfigError(f"{field}={text!r}: trees are drafted by {', '.join(TREE_DRAFTERS)} only")
    try:
        return Strategy(parts["drafter"], int(parts["depth"]), width, verify)
    except ValueError as error:
        raise ConfigError(f"{field}={text!r}: {error}") from None


def strategies(c: Any) -> tuple[Strategy, ...]:
    """The arms of a config, in its order."""
    return tuple(parse_strategy(s) for s in c.rollout.strategies)


def batch_buckets(c: Any) -> tuple[int, ...]:
    """Compiled batch sizes: as given, or powers of two up to `max_batch`."""
    if c.rollout.batch_buckets:
        return c.rollout.batch_buckets
    powers = itertools.takewhile(lambda n: n < c.rollout.max_batch, (2**i for i in itertools.count()))
    return (*powers, c.rollout.max_batch)


def thresholds(c: Any) -> tuple[int, ...]:
    """First batch size of each bandit bucket: as given, or 1, 3, 6, 12, … one for each distinct number of verify tokens."""
    groups = max(1, len({s.verify_tokens for s in strategies(c) if s.speculates}))
    return c.bandit.thresholds or (1, *(3 * 2**i for i in range(groups - 1)))


def check(c: Any) -> None:
    """Raises ConfigError for the first rule that does not hold."""
    _check_sizes(c)
    learner_rules.check(c)
    _check_model(c)
    _check_task(c)
    _check_rollout(c)
    _check_bandit(c)
    _check_drafter(c)
    _check_runtime(c)
    chosen = c.kernels.implementation
    require(
        chosen in ("auto", "xla") or c.learner.devices == 1,
        "kernels.implementation",
        chosen,
        f"auto or xla with learner.devices={c.learner.devices}: the kernels run on one device each",
    )


def learner_kernels(c: Any) -> str:
    """`kernels.implementation` as the learner takes it: over several devices XLA's own operations, which it can split."""
    return "xla" if c.kernels.implementation == "auto" and c.learner.devices > 1 else c.kernels.implementation


def _check_sizes(c: Any) -> None:
    for name in ("top_k", "top_p", "min_p"):
        value, neutral = getattr(c.sampling, name), {"top_k": 0, "top_p": 1.0, "min_p": 0.0}[name]
        require(
            value == neutral,
            f"sampling.{name}",
            value,
            f"a training rollout draws from the whole law ({neutral}), else the importance ratio is biased; "
            f"evaluation.{name} is free",
        )
    n, k = learner_rules.prompts_per_step(c), c.learner.minibatches
    require(n % k == 0, "learner.minibatches", k, f"must divide train.prompts_per_step={n}")
    require(n <= c.task.train_prompts, "train.prompts_per_step", n, f"at most task.train_prompts={c.task.train_prompts}")
    longest = c.task.max_prompt_tokens + c.train.max_new_tokens
    require(
        c.learner.row_length == 0 or c.learner.row_length >= longest,
        "learner.row_length",
        c.learner.row_length,
        f"0, or at least task.max_prompt_tokens + train.max_new_tokens = {longest}",
    )
    require(
        c.drafter.ngram_min <= c.drafter.ngram_max,
        "drafter.ngram_min",
        c.drafter.ngram_min,
        f"at most drafter.ngram_max={c.drafter.ngram_max}",
    )


def _check_model(c: Any) -> None:
    m = c.model
    if m.source != "embedded":
        return
    require(
        m.num_heads % m.num_kv_heads == 0, "model.num_kv_heads", m.num_kv_heads, f"must divide model.num_heads={m.num_heads}"
    )
    require(m.head_dim % 2 == 0, "model.head_dim", m.head_dim, "must be even (rotary positions come in pairs)")
    require(
        m.family != "gpt_neox" or m.num_kv_heads == m.num_heads,
        "model.num_kv_heads",
        m.num_kv_heads,
        f"gpt_neox has as many key-value heads as query heads: {m.num_heads}",
    )
    check_positions(c, m.max_positions)


def check_positions(c: Any, max_positions: int) -> None:
    """The longest sequence must have positions in the model.

    Raises:
        ConfigError: it does not.
    """
    prompt, new = c.task.max_prompt_tokens, c.train.max_new_tokens
    require(
        prompt + new <= max_positions,
        "train.max_new_tokens",
        new,
        f"with task.max_prompt_tokens={prompt} it exceeds the model's {max_positions} positions; "
        f"at most {max_positions - prompt}",
    )


def _check_task(c: Any) -> None:
    name, path = c.task.name, c.task.path
    require(
        name not in NEEDS_PATH or bool(path),
        "task.path",
        path,
        f"task.name={name} reads records; name a file, folder or data set",
    )
    require(name in NEEDS_PATH or not path, "task.path", path, f"task.name={name} makes its own records; leave it empty")
    require(
        c.warm_start.steps == 0 or name in HAS_WORKED_EXAMPLES,
        "warm_start.steps",
        c.warm_start.steps,
        f"task.name={name} has no worked examples; 0, or a task of {', '.join(HAS_WORKED_EXAMPLES)}",
    )


def _check_rollout(c: Any) -> None:
    arms = strategies(c)
    names = c.rollout.strategies
    require(len(set(arms)) == len(arms), "rollout.strategies", names, "each arm once")
    require(OFF in arms, "rollout.strategies", names, "off must be among them: every controller needs the way out")
    buckets = c.rollout.batch_buckets
    require(list(buckets) == sorted(set(buckets)), "rollout.batch_buckets", buckets, "must ascend")
    require(
        not buckets or buckets[-1] == c.rollout.max_batch,
        "rollout.batch_buckets",
        buckets,
        f"the last must be rollout.max_batch={c.rollout.max_batch}",
    )
    sharing = [s.name for s in arms if s.shares_slots]
    require(
        not sharing or c.rollout.verification == "coupled",
        "rollout.verification",
        c.rollout.verification,
        f"rollout.strategies has {', '.join(sharing)}, whose rows share slots: that is exact with coupled only",
    )
    needs_model = any(s.drafter == "model" for s in arms)
    require(
        needs_model == bool(c.drafter.model),
        "drafter.model",
        c.drafter.model,
        "set it exactly when rollout.strategies has a `model` arm",
    )
    replay = c.rollout.replay_arms
    require(not replay or Path(replay).is_file(), "rollout.replay_arms", replay, "no such file")
    chunk, bucket = c.rollout.prefill_chunk, c.rollout.prefill_bucket
    require(chunk % bucket == 0, "rollout.prefill_chunk", chunk, f"0, or a multiple of rollout.prefill_bucket={bucket}")
    looks_up = any(s.drafter in ("history", "merged") for s in arms)
    require(
        looks_up or not c.sampling.reuse_noise_across_epochs,
        "sampling.reuse_noise_across_epochs",
        c.sampling.reuse_noise_across_epochs,
        "it helps only a `history` or `merged` arm in rollout.strategies",
    )
    d = c.drafter
    require(
        d.history_min <= d.history_max, "drafter.history_min", d.history_min, f"at most drafter.history_max={d.history_max}"
    )
    require(
        d.merged_min_match <= d.history_max,
        "drafter.merged_min_match",
        d.merged_min_match,
        f"at most drafter.history_max={d.history_max}",
    )
    learned = any(s.drafter in LEARNED for s in arms)
    require(
        learned or not d.path, "drafter.path", d.path, "set it only where rollout.strategies has an `eagle` or `merged` arm"
    )
    both = {"eagle", "eagle3"} <= {s.drafter for s in arms}
    require(not both, "rollout.strategies", names, "one learned drafter is trained in a run: `eagle` arms or `eagle3` arms")


def _check_bandit(c: Any) -> None:
    require(c.bandit.arm in c.rollout.strategies, "bandit.arm", c.bandit.arm, f"one of {', '.join(c.rollout.strategies)}")
    given = c.bandit.thresholds
    groups = max(1, len({s.verify_tokens for s in strategies(c) if s.speculates}))
    require(
        not given or (len(given) == groups and given[0] == 1 and list(given) == sorted(set(given))),
        "bandit.thresholds",
        given,
        f"must start at 1, ascend, and have one entry for each of the {groups} distinct depths in rollout.strategies",
    )


def _check_drafter(c: Any) -> None:
    d, arms = c.drafter, strategies(c)
    learned = any(s.drafter in LEARNED for s in arms)
    require(
        d.when == "joint" or learned,
        "drafter.when",
        d.when,
        "set it only where rollout.strategies has an arm of a learned drafter",
    )
    require(
        any((d.feature_weight, d.token_weight, d.overlap_weight)),
        "drafter.feature_weight",
        d.feature_weight,
        "one weight of the drafter's loss must be > 0",
    )
    spot = d.when == "spot"
    for name, neutral in (("spot_groups", 1), ("spot_steps", 0)):
        value = getattr(d, name)
        require(spot or value == neutral, f"drafter.{name}", value, f"{neutral}, or set drafter.when=spot")
    require(
        not spot or (d.spot_groups > 1) != (d.spot_steps > 0),
        "drafter.spot_steps",
        d.spot_steps,
        "training steps after each rollout, > 0, on a single device; 0 on several (drafter.spot_groups > 1), which train in the tail",
    )
    require(
        not spot or c.runtime.mode == "sync",
        "drafter.when",
        d.when,
        f"spot trains between rollout and update; runtime.mode=sync only, not {c.runtime.mode}",
    )
    looks_up = any(s.drafter in ("history", "merged") for s in arms)
    require(
        d.spot_groups == 1 or not (looks_up or c.rollout.replay_arms),
        "drafter.spot_groups",
        d.spot_groups,
        "1 with `history` or `merged` arms or rollout.replay_arms: those belong to one engine",
    )


def _check_runtime(c: Any) -> None:
    r = c.runtime
    devices.check(c)
    refreshed = r.refresh == "always" and r.refresh_lag == 1 and r.mode == "lagged"
    require(
        not learner_rules.stale(c) or refreshed or r.allow_uncorrected or learner_rules.corrected(c),
        "runtime.mode",
        r.mode,
        f"it learns from data of earlier policies, but {learner_rules.describe_loss(c)} has no importance correction; choose "
        f"{learner_rules.corrections()}, or set runtime.allow_uncorrected=True to study what happens",
    )
    require(
        r.refresh == "off" or c.rollout.verification == "coupled",
        "runtime.refresh",
        r.refresh,
        f"only rollouts of coupled noise can be verified again; rollout.verification={c.rollout.verification}",
    )
    require(
        r.refresh == "off" or not c.sampling.reuse_noise_across_epochs,
        "runtime.refresh",
        r.refresh,
        "sampling.reuse_noise_across_epochs uses noise again that was learnt from, so a refreshed rollout is no sample",
    )
    require(
        r.refresh == "off" or r.mode != "sync",
        "runtime.refresh",
        r.refresh,
        "runtime.mode=sync has no stale batch; set it to off",
    )
    require(
        not r.pin_versions or r.mode == "overlap",
        "runtime.pin_versions",
        r.pin_versions,
        f"runtime.mode=overlap only, not {r.mode}",
    )
    require(
        not c.learner.max_refills or r.mode == "sync",
        "learner.max_refills",
        c.learner.max_refills,
        f"runtime.mode={r.mode} draws the next prompts for later batches; 0, or runtime.mode=sync",
    )
    replay = c.rollout.replay_arms
    require(
        not replay or (r.mode != "in_flight" and r.refresh == "off"),
        "rollout.replay_arms",
        replay,
        "arms are recorded by batch; not with runtime.mode=in_flight, nor with runtime.refresh",
    )
    require(
        r.mode != "in_flight" or c.rollout.admission == "arrival",
        "rollout.admission",
        c.rollout.admission,
        "runtime.mode=in_flight serves in order of submission, else the learner waits for what was put last: arrival",
    )
