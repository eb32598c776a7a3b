"""What ablations share: one supervised start for all, and short runs of the loop from it, compiled once a loss."""

import contextlib
import dataclasses
import json
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import config_dict

from adrl_jax.metrics import read_lines
from adrl_jax.runtime import loop
from adrl_jax.runtime.parts import Parts
from experiments import build, config, presets, resolve, schema, sft
from experiments.bench.sides import say
from experiments.config import Config
from experiments.configs import quickstart
from experiments.schema import ConfigError
from experiments.train import use_compilation_cache

UNCORRECTED = "none"
NAMES = {"ppo_clip": "grpo", "tis": "tis_grpo", "decoupled": "decoupled_ppo"}
"""Short names of presets, as the tables of this field have them."""

_MAKES_THE_START = ("seed", "task.", "model.", "warm_start.")
_BUT_NOT = ("task.eval_prompts", "task.train_prompts", "task.reward_model", "task.reward_workers")


def corrections() -> tuple[str, ...]:
    """All names: `none`, the short ones, and every preset of the learner."""
    return (UNCORRECTED, *NAMES, *presets.PRESETS)


def settings(correction: str, steps: int, rate: float, changes: Mapping[str, Any]) -> Config:
    """The quickstart's task and model with a correction by name, 64 responses a batch.

    `none` is REINFORCE on whatever arrives; the positive control. All losses have the same learning rate and batches.

    Raises:
        ConfigError: unknown name, or a field that is not legal.
    """
    c = quickstart.get_config()
    c.warm_start.steps = 600
    c.train.steps, c.train.prompts_per_step, c.train.group_size = steps, 8, 8
    # Room for 64 of the longest responses in always the same shape; microbatches that hold only padding are skipped.
    c.learner.row_multiple = 64
    c.learner.learning_rate = rate
    c.log.compare_repeats, c.log.tensorboard, c.log.report, c.log.samples_per_step = 0, False, False, 0
    c.checkpoint.every, c.evaluation.every = 10_000, 0
    c.bandit.name, c.bandit.arm, c.rollout.strategies, c.bandit.thresholds = "fixed", "off", ("off",), ()
    c.runtime.mode, c.runtime.lag = "lagged", 1
    if correction == UNCORRECTED:
        c.learner.surrogate, c.runtime.allow_uncorrected = "reinforce", True
    else:
        presets.apply(c, NAMES.get(correction, correction))
    update(c, changes)
    return config.freeze(c)


def update(c: config_dict.ConfigDict, changes: Mapping[str, Any]) -> None:
    """Sets fields by their dotted names.

    Raises:
        ConfigError: there is no such field, or it holds values of another type.
    """
    try:
        c.update_from_flattened_dict(dict(changes))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"changes: {error.args[0]}") from error


def start(c: Config, folder: pathlib.Path) -> Config:
    """The settings, beginning with a supervised policy that is trained into `folder`, or found there.

    Raises:
        ConfigError: what is there was trained with other settings.
    """
    home = folder / "sft"
    if (home / "sft.json").exists():
        for path, old, new in schema.differences(config.load(home / "config.json"), c):
            if path.startswith(_MAKES_THE_START) and path not in _BUT_NOT:
                raise ConfigError(
                    f"--workdir={str(folder)!r} has a policy trained with {path}={old!r}, this run has {new!r}; name another folder"
                )
    else:
        say(f"one supervised policy for all runs, {c.warm_start.steps} updates, into {home}")
        home.mkdir(parents=True, exist_ok=True)
        sft.run(c, home)
    return sft.of_source(c, home)


class Runs(contextlib.AbstractContextManager):
    """Runs of the loop from one start, for any correction, seed and fields of `LoopConfig`.

    A correction's parts are built once, and all corrections share an engine, so that each program is compiled once in the
    process. A seed names the noise and the order of prompts; the policy that runs begin with is the same for all seeds.
    """

    def __init__(self, folder: pathlib.Path, steps: int, rate: float, changes: Mapping[str, Any]):
        self._folder, self._sizes = folder, (steps, rate, dict(changes))
        use_compilation_cache("default", folder)
        self._stack = contextlib.ExitStack()
        self._made: dict[str, tuple[Config, Parts]] = {}
        self._measures: dict[int, Any] = {}

    def __exit__(self, *exception) -> None:
        self._stack.close()

    def run(self, correction: str, seed: int, **fields: Any) -> dict[str, Any]:
        """What was measured in one run; `fields` of `LoopConfig` are changed.

        Raises:
            SystemExit: the process was asked to stop.
        """
        c, parts = self._parts(correction)
        limits = dataclasses.replace(resolve.loop_config(c), seed=seed, **fields)
        with tempfile.TemporaryDirectory(dir=self._folder) as workdir:
            outcome = loop.run(self._named(c, parts, seed), limits, pathlib.Path(workdir))
            if outcome.status != "done":
                raise SystemExit("stopped on request; the same command goes on after the last row that was written")
            return measured(pathlib.Path(workdir), limits.limit)

    def _parts(self, correction: str) -> tuple[Config, Parts]:
        if correction not in self._made:
            c = start(settings(correction, *self._sizes), self._folder)
            parts = self._stack.enter_context(build.opened(c))
            if self._made:
                shared = next(iter(self._made.values()))[1].engine
                parts = dataclasses.replace(parts, engine=shared)
            self._made[correction] = c, parts
        return self._made[correction]

    def _named(self, c: Config, parts: Parts, seed: int) -> Parts:
        """The parts under another seed."""
        parts.engine.reseed(seed)
        if seed not in self._measures:
            other = dataclasses.replace(c, seed=seed)
            self._measures[seed] = build.disagreement(other, parts.model_config, parts.tokenizer.size)
        return dataclasses.replace(parts, disagreement=self._measures[seed], identity={**parts.identity, "seed": seed})


def measured(workdir: pathlib.Path, lag: int = 0) -> dict[str, Any]:
    """Rewards and rates of a finished run. The first two steps and the last `lag`, which generate nothing, have no part in
    rates."""
    lines = read_lines(workdir / "metrics.jsonl")
    rows = [r for r in lines if r["phase"] == "train"]
    ends = [r["reward/mean"] for r in lines if r["phase"] == "evaluate"]
    kept = rows[2 : max(len(rows) - lag, 0)] or rows

    def mean(name: str) -> float | None:
        found = [r[name] for r in kept if r.get(name) is not None]
        return statistics.mean(found) if found else None

    return {
        "reward_start": ends[0],
        "reward_end": ends[-1],
        "reward_best": max(r["reward/mean"] for r in rows),
        "disagreement": mean("staleness/disagreement"),
        "staleness": mean("staleness/mean"),
        "reused": mean("refresh/reused"),
        "refresh_s": mean("refresh/seconds"),
        "generate_s": mean("time/rollout"),
        "seconds": mean("time/step") - mean("time/compile"),
        "ess": mean("mismatch/ess"),
    }


def numbers(text: str, kind: Callable[[str], Any] = int) -> tuple[Any, ...]:
    """`1,2,4` as numbers."""
    return tuple(kind(x) for x in text.split(",") if x)


def check_sizes(flags: Any, lags: tuple[int, ...], least: int, **counts: int) -> None:
    """Ends the program (`flags` is its parser) at a lag below `least`, or a count below 1."""
    for lag in lags:
        if lag < least:
            flags.error(f"--lags={lag} must be >= {least}")
    for name, value in counts.items():
        if value < 1:
            flags.error(f"--{name}={value} must be >= 1")


def changes(flags: Any, text: str) -> dict[str, Any]:
    """`--changes` as fields; ends the program where it is no JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        flags.error(f"--changes={text!r} is no JSON: {error}")
    if not isinstance(found, dict):
        flags.error(f'--changes={text!r} must be an object of config fields, such as {{"train.group_size": 4}}')
    return found


def chosen(flags: Any, name: str, text: str, legal: tuple[str, ...]) -> list[str]:
    """`a,b` as names; ends the program (`flags` is its parser) at one that is not legal."""
    found = [x for x in text.split(",") if x]
    for x in found:
        if x not in legal:
            flags.error(f"--{name}={x!r} is unknown; choose of {', '.join(legal)}")
    if not found:
        flags.error(f"--{name}={text!r} names nothing; choose of {', '.join(legal)}")
    return found
