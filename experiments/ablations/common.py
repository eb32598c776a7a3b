"""What ablations of stale data share: short quickstart runs from one warm start, one seed after the other."""

import dataclasses
import pathlib
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from adrl_jax.metrics import read_lines
from adrl_jax.runtime import loop
from experiments import build, config, presets, resolve
from experiments.configs import quickstart

UNCORRECTED = "none"
NAMES = {"ppo_clip": "grpo", "tis": "tis_grpo", "decoupled": "decoupled_ppo"}
"""Short names of presets, as the tables of this field have them."""


def corrections() -> tuple[str, ...]:
    """All names: `none`, the short ones, and every preset of the learner."""
    return (UNCORRECTED, *NAMES, *presets.PRESETS)


def settings(correction: str, seed: int, steps: int, changes: Mapping[str, Any]) -> config.Config:
    """The quickstart with a correction by name.

    `none` is REINFORCE on whatever arrives; the positive control. All losses have the same learning rate and batches.

    Raises:
        ConfigError: unknown name, or a field that is not legal.
    """
    c = quickstart.get_config()
    c.seed, c.train.steps = seed, steps
    c.log.compare_repeats, c.log.tensorboard, c.log.report, c.log.samples_per_step = 0, False, False, 0
    c.checkpoint.every, c.evaluation.every = 10_000, 0
    c.bandit.name, c.bandit.arm, c.rollout.strategies, c.bandit.thresholds = "fixed", "off", ("off",), ()
    c.runtime.mode, c.runtime.lag = "lagged", 1
    if correction == UNCORRECTED:
        c.learner.surrogate, c.runtime.allow_uncorrected = "reinforce", True
    else:
        presets.apply(c, NAMES.get(correction, correction))
    c.update_from_flattened_dict(dict(changes))
    return config.freeze(c)


class Runs:
    """Runs from shared warm starts: supervised updates do not depend on the loss that follows.

    A correction that brings a reference or value model has state of its own, so such starts are kept apart by its name.
    """

    def __init__(self, folder: pathlib.Path, steps: int, changes: Mapping[str, Any]):
        self._folder, self._steps, self._changes = folder, steps, dict(changes)

    def each(
        self, correction: str, seed: int, variants: Iterable[tuple[str, Mapping[str, Any]]]
    ) -> Iterable[tuple[str, dict[str, Any]]]:
        """(name, what was measured) of each variant; `variants` are names with fields of `LoopConfig` to change."""
        c = settings(correction, seed, self._steps, self._changes)
        with build.opened(c) as parts:
            start = self._start(correction, seed, c, parts)
            for name, fields in variants:
                with tempfile.TemporaryDirectory(dir=self._folder) as workdir:
                    path = pathlib.Path(workdir)
                    shutil.copytree(start, path, dirs_exist_ok=True)
                    loop.run(parts, dataclasses.replace(resolve.loop_config(c), **fields), path)
                    yield name, measured(path, fields.get("limit", 0))

    def _start(self, correction: str, seed: int, c: config.Config, parts: Any) -> pathlib.Path:
        state = parts.init_learner()
        own = correction if state.reference is not None or state.value is not None else "plain"
        start = self._folder / f"start-{own}-{seed}"
        if not start.exists():
            say(f"warm start for {own}, seed {seed}")
            start.mkdir()
            loop.run(parts, dataclasses.replace(resolve.loop_config(c), steps=0, mode="sync", limit=0), start)
            (start / "summary.json").unlink()
        return start


def measured(workdir: pathlib.Path, lag: int = 0) -> dict[str, Any]:
    """Rewards and rates of a finished run. The first two steps and the last `lag`, which generate nothing, have no part in
    rates."""
    lines = read_lines(workdir / "metrics.jsonl")
    rows = [r for r in lines if r["phase"] == "train"]
    ends = [r["reward/mean"] for r in lines if r["phase"] == "evaluate"]
    kept = rows[2 : len(rows) - lag] or rows

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


def say(text: str) -> None:
    print(f"  {text}", flush=True)
