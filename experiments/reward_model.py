"""Trains a reward model on preferences: `python -m experiments.reward_model --config=FILE --workdir=DIR`.

The policy (`model.source`, for instance the folder that experiments.sft wrote) answers training prompts several times, a gold reward
(the task's own score, or another reward model) says which answer is the best and which the worst, and a model on the policy's
weights learns to tell them apart. The workdir is then a reward model: `task.reward_model` of a training run and
`preferences.gold` take it. `reward_model.json` holds accuracy and calibration on pairs of held-out prompts. A gold model and a proxy are
two runs: the gold one on the task's score, the proxy on `preferences.gold=` the first.
Exit codes: 0 done, 2 a setting is wrong.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adrl_jax.bandit.fixed import fixed
from adrl_jax.learner import packing
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.learner.update import data_mesh, init_state
from adrl_jax.metrics import JsonLines
from adrl_jax.models.transformer import engine_layout
from adrl_jax.rewards import reward_model
from adrl_jax.rewards.reward_model import Pair, RewardModel
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.runtime import collect, numbers
from adrl_jax.runtime.parts import EVALUATION_VISIT
from adrl_jax.runtime.progress import Progress
from adrl_jax.types import Prompt, Rollout, SamplingParams
from experiments import build, reward_config, schema, stage
from experiments.learners import Policy, row_lengths
from experiments.reward_config import RewardConfig
from experiments.schema import ConfigError

PREFERENCE_VISIT = EVALUATION_VISIT - 2
"""Visit number of these requests: their noise is nobody else's."""


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv` (program name first); returns the exit code."""
    return stage.main(argv, "experiments.reward_model", RewardConfig, _checked, run, _told)


def _checked(c: RewardConfig) -> RewardConfig:
    reward_config.check(c)
    return c


def _told(record: dict[str, Any], workdir: Path) -> str:
    return (
        f"{record['train_pairs']} pairs; held out ({record['held_out_pairs']}): accuracy {record['accuracy']:.3f}, "
        f"log loss {record['log_loss']:.3f}, calibration error {record['ece']:.3f}; reward model in {workdir}"
    )


def run(c: RewardConfig, workdir: Path) -> dict[str, Any]:
    """Generates, judges, trains, measures and saves; returns what is written to `reward_model.json`.

    Raises:
        ConfigError, ValueError, FileNotFoundError: something that the user can mend.
    """
    (workdir / "config.json").write_text(json.dumps(schema.as_dict(c), indent=2) + "\n")
    settings = reward_config.as_run(c)
    task = build.open_task(settings)
    target = build.policy(settings, build.ALPHABETS.get(c.task.name))
    task = task.encode(target.tokenizer)
    params = target.make()
    row_length = row_lengths(c.task.max_prompt_tokens + c.preferences.max_new_tokens)[0]
    prompts = [task.prompts("train")[i] for i in range(c.preferences.prompts)]
    rollouts, owners = sample(c, target, params, prompts)
    with build.scoring(settings, task) as scorer:
        gold = judge(c, target, rollouts, owners, scorer, row_length)
    pairs, ties = make_pairs(rollouts, gold, c.preferences.samples)
    if len(pairs) < 2:
        raise ConfigError(
            f"preferences.prompts={c.preferences.prompts!r} gave {len(pairs)} pairs ({ties} ties); at least 2 needed"
        )
    held = max(1, int(len(pairs) * c.preferences.held_out))
    model, record = fit(c, target, params, pairs[held:], pairs[:held], row_length, workdir)
    record |= {"ties": ties, "gold": c.preferences.gold or "task", "gold_mean": float(gold.mean())}
    reward_model.save(workdir, dataclasses.replace(model, record=record))
    return record


def sample(c: RewardConfig, target: Policy, params: Any, prompts: Sequence[Prompt]) -> tuple[list[Rollout], list[Prompt]]:
    """`samples` responses to each prompt, siblings side by side, and the prompt of each."""
    p = c.preferences
    engine = Engine(
        target.config,
        EngineConfig(
            seed=c.seed,
            eos_ids=tuple(target.tokenizer.eos_ids),
            valid_vocab=target.tokenizer.size,
            max_batch=p.max_batch,
            batch_buckets=tuple(sorted({max(1, p.max_batch // 4), p.max_batch})),
            cache_bucket=128,
        ),
    )
    engine.publish(engine_layout(params, target.config), 0)
    requests = collect.requests_for(prompts, [PREFERENCE_VISIT] * len(prompts), p.samples, p.max_new_tokens)
    plain = fixed(0, 1)
    result = engine.generate(requests, SamplingParams(temperature=p.temperature), plain, plain.init())
    return list(result.rollouts), [r.prompt for r in requests]


def judge(
    c: RewardConfig, target: Policy, rollouts: Sequence[Rollout], owners: Sequence[Prompt], scorer: Any, row_length: int
) -> np.ndarray:
    """Gold rewards, float64 `[N]`: of the task, or of the model that `preferences.gold` names."""
    if c.preferences.gold:
        scorer = reward_model.Rewarder(reward_model.load(c.preferences.gold), row_length)
    return collect.score(rollouts, owners, target.tokenizer, scorer).rewards


def make_pairs(rollouts: Sequence[Rollout], gold: np.ndarray, samples: int) -> tuple[list[Pair], int]:
    """Best and worst of each group as (prompt, chosen, rejected) ids, and how many groups tied."""
    pairs, ties = [], 0
    for start in range(0, len(rollouts), samples):
        values = gold[start : start + samples]
        if values.max() == values.min():
            ties += 1
            continue
        best, worst = rollouts[start + int(values.argmax())], rollouts[start + int(values.argmin())]
        pairs.append((best.token_ids[: best.prompt_length], best.response_ids, worst.response_ids))
    return pairs, ties


def fit(
    c: RewardConfig,
    target: Policy,
    params: Any,
    train: Sequence[Pair],
    held_out: Sequence[Pair],
    row_length: int,
    workdir: Path | None = None,
) -> tuple[RewardModel, dict[str, Any]]:
    """A reward model on the policy's weights, and its record: accuracy and calibration on `held_out`."""
    x = c.training
    optimizer = make_optimizer(
        OptimizerConfig(
            learning_rate=x.learning_rate,
            schedule="linear",
            warmup_steps=x.steps // 10,
            total_steps=max(x.steps, x.steps // 10 + 1),
            weight_decay=x.weight_decay,
            clip_norm=x.max_grad_norm,
        )
    )
    fresh = reward_model.from_policy(target.config, target.tokenizer, params, jax.random.fold_in(jax.random.key(c.seed), 4))
    update = reward_model.make_reward_update(fresh.config, optimizer, data_mesh(1), microbatch_rows=x.microbatch_rows)
    state = init_state(fresh.params, optimizer)
    # Both sides of a pair in one row, and always the same number of rows: one program.
    rows = packing.round_up(x.batch_pairs, x.microbatch_rows)
    sizes = dict(row_length=2 * row_length, row_multiple=rows, target_multiple=2 * row_length, layout="prefix_shared")
    rng = np.random.default_rng([c.seed, 5])
    turned = rng.random(len(train)) < c.preferences.label_noise
    given = [(p, b, a) if flip else (p, a, b) for (p, a, b), flip in zip(train, turned, strict=True)]
    lines = None if workdir is None else JsonLines(workdir / "metrics.jsonl", 0)
    progress = Progress("reward model", x.steps)
    for step in range(x.steps):
        chosen = [given[i] for i in rng.integers(0, len(given), x.batch_pairs)]
        state, values = update(state, reward_model.pairs_batch(chosen, **sizes))
        values = numbers.on_host(values)
        if lines is not None:
            lines.append({"phase": "reward_model", "step": step + 1, **values})
        progress.step(loss=values["loss"], accuracy=values["accuracy"])
    progress.close()
    model = dataclasses.replace(fresh, params=state.params)
    rewarder = reward_model.Rewarder(model, row_length)
    better, worse = (rewarder.values([(pair[0], pair[side]) for pair in held_out]) for side in (1, 2))
    record = {"train_pairs": len(train), "held_out_pairs": len(held_out), **reward_model.calibration(better - worse)}
    return model, record


if __name__ == "__main__":
    sys.exit(main(sys.argv))
