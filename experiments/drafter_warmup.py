"""Trains an EAGLE drafter for a policy before RL: `python -m experiments.drafter_warmup --config=FILE --workdir=DIR`.

The policy answers training prompts of the task, the drafter learns to foresee those answers, and held-out prompts are answered
with it before and after. The workdir gets `drafter.safetensors` and `drafter.json` (what `drafter.path` of a training run and
`--drafter` of the benchmarks take), `metrics.jsonl`, `config.json`, and `responses.npz`: run again with other training settings, it
takes those answers instead of generating them anew. `--help` lists every field; experiments/configs/drafter/ has examples.
Exit codes: 0 done, 2 a setting is wrong.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.bandit.fixed import fixed
from adrl_jax.drafter import checkpoint, responses, start, vocabulary, warmup
from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.learner.optimizer import make_optimizer
from adrl_jax.metrics import JsonLines
from adrl_jax.models.transformer import engine_layout
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.rollout.stats import LaunchRecord
from adrl_jax.runtime.parts import EVALUATION_VISIT
from adrl_jax.runtime.progress import Progress
from adrl_jax.runtime.publish import fingerprint
from adrl_jax.speculation.eagle import DRAFT_IDS, Eagle, split
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import Prompt, Request, Rollout, SamplingParams
from experiments import build, schema, stage, warmup_config
from experiments.build import Policy
from experiments.schema import require
from experiments.warmup_config import WarmupConfig

_CALL = 4  # batches handed to the engine at once: one call's tail runs at small batches
WARMUP_VISIT = EVALUATION_VISIT - 1
"""Visit number of warm-up requests: their noise is nobody else's, so what RL draws later was never trained on."""


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv` (program name first); returns the exit code."""
    return stage.main(argv, "experiments.drafter_warmup", WarmupConfig, _checked, run, _told)


def _checked(c: WarmupConfig) -> WarmupConfig:
    warmup_config.check(c)
    return c


def _told(record: dict[str, Any], workdir: Path) -> str:
    lines = [
        f"temperature {law}: accept length {before:.2f} before, {record['accept_length_after'][law]:.2f} after"
        for law, before in record["accept_length_before"].items()
    ]
    lines.append(f"{record['train_tokens']} response tokens, {record['train_s']:.0f} s of training; drafter in {workdir}")
    return "\n".join(lines)


def run(
    c: WarmupConfig, workdir: Path, *, read: dict[Any, list[warmup.Lesson]] | None = None, measure_before: bool = True
) -> dict[str, Any]:
    """Generates, trains, measures and saves; returns what is written to `drafter.json` beside the target's facts.

    Args:
        read: what the policy made of the responses, kept from one call to the next where only the training differs. All calls
            must be given the same responses.
        measure_before: whether the untrained drafter is measured too; else its accept lengths are left out.

    Raises:
        ConfigError, ValueError, FileNotFoundError: something that the user can mend.
    """
    (workdir / "config.json").write_text(json.dumps(schema.as_dict(c), indent=2) + "\n")
    target, train, held_out = _open(c)
    params = target.make()
    served = engine_layout(params, target.config)
    identity = fingerprint(params)
    lines = JsonLines(workdir / "metrics.jsonl", length=0)

    began = time.perf_counter()
    rollouts = _responses(c, workdir, target, served, identity, train)
    generated_s = time.perf_counter() - began
    drafter, drafter_params = _fresh(c, target, rollouts)
    layout = drafter.taps, c.training.rows, c.training.row_length
    read = {} if read is None else read
    if layout not in read:
        read[layout] = _lessons(c, drafter, params, rollouts)
    lessons = read[layout]

    engine = _evaluation_engine(c, target, drafter)
    before: dict[str, float] = {}
    if measure_before:
        before, _ = _accept_lengths(c, engine, served, drafter_params, held_out, "before")
        lines.append({"phase": "evaluate", "step": 0, **_flat("accept_length", before)})
    began = time.perf_counter()
    drafter_params, skipped = _train(c, drafter, target.tokenizer.size, params, drafter_params, lessons, lines)
    train_s = time.perf_counter() - began
    after, speed = _accept_lengths(c, engine, served, drafter_params, held_out, "after")
    lines.append({"phase": "evaluate", "step": c.training.steps, **_flat("accept_length", after)})
    lines.close()
    record = {
        "source": target.source,
        "task": c.task.name,
        "temperatures": list(warmup_config.temperatures(c)),
        "train_tokens": sum(x.tokens for x in lessons),
        "train_steps": c.training.steps,
        "train_s": train_s,
        "generate_s": generated_s,
        "skipped_steps": skipped,
        "coverage": vocabulary.coverage(rollouts, np.asarray(drafter_params[DRAFT_IDS]))
        if DRAFT_IDS in drafter_params
        else 1.0,
        "depth": c.evaluation.depth,
        "accept_length_before": before,
        "accept_length_after": after,
        "tokens_per_s_after": speed,
    }
    checkpoint.save(workdir, drafter, drafter_params, target_fingerprint=identity, record=record)
    return record


def _open(c: WarmupConfig) -> tuple[Policy, Sequence[Prompt], Sequence[Prompt]]:
    """The policy, and prompts to train on and to measure on."""
    full = warmup_config.as_run(c)
    target = build.policy(full, warmup_config.ALPHABETS.get(c.task.name))
    size, valid = c.training.draft_vocab_size, target.tokenizer.size
    require(
        size <= valid, "training.draft_vocab_size", size, f"at most {valid}, the ids that this policy can draw; 0 allows all"
    )
    task = build.open_task(full)
    if c.task.name == "gsm8k" and c.generation.bare_questions:
        task = dataclasses.replace(task, instruction="")
    task = task.encode(target.tokenizer)
    first, most = c.generation.first_prompt, c.task.train_prompts
    everything, held_out = task.prompts("train"), task.prompts("test")[: c.task.eval_prompts]
    require(len(everything) > 0, "task.path", c.task.path, "no training prompts in it")
    require(len(everything) > first, "generation.first_prompt", first, f"the train split has {len(everything)} prompts")
    require(len(held_out) > 0, "task.path", c.task.path, "no test prompts in it")
    train = everything[first : first + most]
    for name, found in (("train", train), ("test", held_out)):
        build.check_prompts(c, name, found)
    return target, train, held_out


def _request(c: WarmupConfig, prompts: Sequence[Prompt], number: int, visit: int) -> Request:
    """Request `number`: the prompts in turn, each time with another sample."""
    sample, place = divmod(number, len(prompts))
    return Request(prompts[place], visit, sample, place, c.generation.max_new_tokens, c.generation.forced_length)


def _responses(
    c: WarmupConfig, workdir: Path, target: Policy, served: Any, identity: str, prompts: Sequence[Prompt]
) -> list[Rollout]:
    """Responses to training prompts, `generation.tokens` tokens or a little more: generated, or those of an earlier run in this
    workdir where policy, task and generation settings are the same."""
    g = c.generation
    settings = schema.as_dict(c)
    key = {name: settings[name] for name in ("seed", "task", "generation")} | {"policy": identity}
    path = workdir / "responses.npz"
    kept = responses.load(path, key)
    if kept is not None:
        print(f"{len(kept)} responses taken from {path}", file=sys.stderr)
        return kept
    config = EngineConfig(
        seed=c.seed,
        eos_ids=tuple(target.tokenizer.eos_ids),
        valid_vocab=target.tokenizer.size,
        max_batch=g.max_batch,
        batch_buckets=tuple(sorted({max(1, g.max_batch // 4), max(1, g.max_batch // 2), g.max_batch})),
        cache_bucket=128,
    )
    engine = Engine(target.config, config)
    engine.publish(served, 0)
    plain = fixed(0, 1)
    laws = warmup_config.temperatures(c)
    progress = Progress("generate, 1000 tokens", -(-g.tokens // 1000))
    found: list[Rollout] = []
    produced = 0

    def launched(launch: LaunchRecord) -> None:
        nonlocal produced
        before, produced = produced, produced + launch.tokens
        for _ in range(min(produced, g.tokens) // 1000 - min(before, g.tokens) // 1000):
            progress.step(temperature=temperature, running=launch.running, tokens_per_s=launch.tokens / launch.seconds)

    for law, temperature in enumerate(laws):
        tokens = asked = 0
        while tokens * len(laws) < g.tokens:
            # Prompts in turn, then again; temperatures share them out, so that no two draw with the same noise.
            count = -(-(g.tokens // len(laws) - tokens) // g.max_new_tokens)  # were all of them as long as they may be
            count = min(max(count, g.max_batch // 4, 1), _CALL * g.max_batch)
            numbers = range(asked * len(laws) + law, (asked + count) * len(laws), len(laws))
            asked += count
            result = engine.generate(
                [_request(c, prompts, k, WARMUP_VISIT) for k in numbers],
                SamplingParams(temperature=temperature),
                plain,
                plain.init(),
                on_launch=launched,
            )
            found += result.rollouts
            tokens += sum(r.response_length for r in result.rollouts)
    progress.close()
    responses.save(path, found, key)
    return found


def _fresh(c: WarmupConfig, target: Policy, rollouts: Sequence[Rollout]) -> tuple[Eagle, Any]:
    """The untrained drafter and its parameters."""
    size = c.training.draft_vocab_size or None
    drafter = checkpoint.KINDS[c.training.architecture](target.config, draft_vocab_size=size)
    params = drafter.init_params(jax.random.fold_in(jax.random.key(c.seed), 1))
    if size is not None:
        ids = vocabulary.choose_ids(
            rollouts,
            size,
            target.config.vocab_size,
            valid_vocab=target.tokenizer.size,
            always=tuple(target.tokenizer.eos_ids),
        )
        params = {**params, DRAFT_IDS: jnp.asarray(ids)}
    return drafter, params


def _lessons(c: WarmupConfig, drafter: Eagle, params: Any, rollouts: Sequence[Rollout]) -> list[warmup.Lesson]:
    longest = max(len(r.token_ids) for r in rollouts)
    progress = None

    def done(batch: int, batches: int) -> None:
        nonlocal progress
        progress = progress or Progress("read", batches)
        progress.step()

    lessons = warmup.make_lessons(
        params,
        drafter.target,
        rollouts,
        rows=c.training.rows,
        row_length=c.training.row_length or -(-longest // 32) * 32,
        seed=c.seed,
        on_batch=done,
    )
    progress.close()
    return lessons


def _train(
    c: WarmupConfig,
    drafter: Eagle,
    valid_vocab: int,
    params: Any,
    drafter_params: Any,
    lessons: list[warmup.Lesson],
    lines: JsonLines,
) -> tuple[Any, int]:
    """Trained parameters, and how many steps were skipped."""
    x = c.training
    trained, fixed_part = split(drafter_params)
    optimizer = make_optimizer(warmup_config.optimizer_config(c))
    if x.start == "regression":
        fuse = start.fusion(drafter.target, lessons) if drafter.taps else None
        found = start.moments(params, drafter.target, lessons, fuse)
        optimizer = start.in_units(optimizer, start.units(trained, found, fuse))
        trained = start.begin(trained, drafter.target, found, fuse=fuse)
    loss = DrafterLossConfig(x.feature_weight, x.token_weight, x.overlap_weight, x.depths, x.depth_decay)
    step = warmup.make_step(drafter.target, loss, optimizer, valid_vocab=valid_vocab)
    state = warmup.init_state(jax.tree.map(jnp.array, trained), optimizer)
    progress = Progress("train", x.steps)
    for number, at in enumerate(warmup.order(c.seed, len(lessons), x.steps), 1):
        began = time.perf_counter()
        state, metrics = step(state, fixed_part, params, lessons[at])
        row = {name: float(value) for name, value in jax.device_get(metrics).items()}
        seconds = time.perf_counter() - began
        lines.append({"phase": "train", "step": number, **row, "seconds": seconds, "tokens": lessons[at].tokens})
        foreseen = warmup.expected_accept_length(row, c.evaluation.depth)
        progress.step(loss=row["loss"], agreement=row["agreement"], accept=foreseen, tokens_per_s=lessons[at].tokens / seconds)
    progress.close()
    return {**state.trained, **fixed_part}, int(state.skipped)


def _evaluation_engine(c: WarmupConfig, target: Policy, drafter: Eagle) -> Engine:
    config = EngineConfig(
        seed=c.seed,
        eos_ids=tuple(target.tokenizer.eos_ids),
        valid_vocab=target.tokenizer.size,
        strategies=(OFF, Strategy(drafter.name, c.evaluation.depth)),
        max_batch=c.evaluation.max_batch,
        batch_buckets=(c.evaluation.max_batch,),
        cache_bucket=128,
    )
    return Engine(target.config, config, {drafter.name: drafter})


def _accept_lengths(
    c: WarmupConfig, engine: Engine, served: Any, drafter_params: Any, prompts: Sequence[Prompt], when: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Tokens committed a verify pass on held-out prompts, and tokens a second, by temperature; always with the same noise."""
    (drafter,) = engine.drafters.values()
    own = drafter.serve(engine_layout(drafter_params, engine.model_config), served)
    engine.publish(served, 0, {drafter.name: own})
    always = fixed(1, 2)
    requests = [_request(c, prompts, k, EVALUATION_VISIT) for k in range(len(prompts) * c.evaluation.samples)]
    found, speed = {}, {}
    progress = Progress(f"held out, {when}", len(warmup_config.temperatures(c)))
    for temperature in warmup_config.temperatures(c):
        result = engine.generate(requests, SamplingParams(temperature=temperature), always, always.init())
        passes = sum(r.accept_passes for r in result.rollouts)
        speed[f"{temperature:g}"] = float(result.stats.tokens_per_s)
        found[f"{temperature:g}"] = sum(r.accept_tokens for r in result.rollouts) / passes
        progress.step(temperature=temperature, accept_length=found[f"{temperature:g}"])
    progress.close()
    return found, speed


def _flat(name: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{name}/{law}": value for law, value in values.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv))
