"""One side of `bench.runtime` in a process of its own: how many devices there are is fixed when JAX starts.

python -m experiments.bench.runtime_side '{"model": "quickstart", "mode": "sync", …}' prints one line of JSON, the last one.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import jax

from adrl_jax.metrics import read_lines
from adrl_jax.runtime import loop
from adrl_jax.runtime.parts import EVALUATION_VISIT
from experiments import build, config, resolve
from experiments.bench.emulated import Emulated, Pace, Recorder
from experiments.configs import quickstart, smollm2_arithmetic
from experiments.train import use_compilation_cache

CONFIGS = {"quickstart": quickstart, "smollm2": smollm2_arithmetic}
WARM_UP = 3  # first steps, in which programs are met for the first time


def settings(ask: Mapping[str, Any]) -> config.Config:
    """The settings of one side; `ask` is what the parent sends.

    Raises:
        ConfigError: a changed field is not legal.
    """
    c = CONFIGS[ask["model"]].get_config()
    c.seed = ask["seed"]
    c.train.steps = ask["steps"]
    c.runtime.mode, c.runtime.max_staleness = ask["mode"], ask.get("max_staleness", 1)
    c.runtime.queue = ask.get("queue", 2)
    c.log.compare_repeats, c.log.tensorboard, c.log.report, c.log.samples_per_step = 0, False, False, 0
    c.checkpoint.every, c.evaluation.every = 10_000, 0
    if not ask["spec"]:
        c.rollout.strategies, c.bandit.name, c.bandit.arm, c.bandit.thresholds = ("off",), "fixed", "off", ()
    c.update_from_flattened_dict(ask.get("changes", {}))
    return config.freeze(c)


def measured(workdir: pathlib.Path) -> dict[str, Any]:
    """Rates of a finished run; first steps and compilation left out. `curve` has (seconds, responses, reward) of all steps."""
    rows = [r for r in read_lines(workdir / "metrics.jsonl") if r["phase"] == "train"]
    kept = rows[min(WARM_UP, len(rows) - 1) :]

    def mean(name: str) -> float:
        return sum(r.get(f"time/{name}", 0.0) for r in kept) / len(kept)

    step = mean("step") - mean("compile")
    generate = mean("rollout")
    clock, curve = 0.0, []
    for row in rows:
        clock += row["time/step"] - row["time/compile"]
        curve.append((clock, row["reward/mean"]))
    summary = json.loads((workdir / "summary.json").read_text())
    return {
        "step_s": step,
        "generate_s": generate,
        "learn_s": step - generate,
        "learner_wait_s": mean("learner_wait"),
        "generator_wait_s": mean("generator_wait"),
        "staleness": sum(r["staleness/mean"] for r in kept) / len(kept),
        "reward_start": summary["reward_start"],
        "reward_end": summary["reward_end"],
        "curve": curve,
        "cores": len(os.sched_getaffinity(0)),
        "devices": jax.device_count(),
    }


def real(ask: Mapping[str, Any], workdir: pathlib.Path) -> dict[str, Any]:
    """Runs one mode; with `steps` 0 only what comes before: warm start and first evaluation."""
    c = settings(ask)
    with build.opened(c) as parts:
        loop.run(parts, resolve.loop_config(c), workdir)
    return measured(workdir) if ask["steps"] else {}


def emulated(ask: Mapping[str, Any], workdir: pathlib.Path) -> dict[str, Any]:
    """A real synchronous run, then all modes with its responses handed out at a pace at which G equals L.

    The learner's seconds L are those of the recorded run; launches are stretched or shortened so that a batch takes as long.
    """
    c = settings(dict(ask, mode="sync"))
    limits = resolve.loop_config(c)
    out: dict[str, Any] = {}
    with build.opened(c) as parts:
        recorder = Recorder(parts.engine)
        loop.run(dataclasses.replace(parts, engine=recorder), limits, workdir)
        found = measured(workdir)
        rows = c.rollout.max_batch
        pace = Pace.of(recorder.launches, rows)
        probe = Emulated(recorder.recorded, pace)
        generate = _seconds_of_a_batch(probe, limits, recorder.recorded)
        pace = pace.scaled(found["learn_s"] / generate)
        for mode in ("sync", "overlap", "in_flight"):
            limit = 0 if mode == "sync" else ask.get("max_staleness", 1)
            fast = dataclasses.replace(limits, mode=mode, limit=limit, queue=ask.get("queue", 2))
            pieces = dataclasses.replace(
                parts,
                engine=Emulated(recorder.recorded, pace),
                generator_device=None if mode == "sync" else jax.devices()[0],
            )
            with tempfile.TemporaryDirectory() as folder:
                copy_start(ask, pathlib.Path(folder))
                loop.run(pieces, fast, pathlib.Path(folder))
                out[mode] = measured(pathlib.Path(folder))
    lengths = [[r.response_length for r in group] for group in _batches(recorder.recorded, limits)]
    shown = {"seconds": dict(pace.seconds), "tokens": pace.tokens, "rows": pace.rows}
    return out | {"learn_s": found["learn_s"], "generate_s": found["generate_s"], "pace": shown, "lengths": lengths}


def _batches(recorded: Mapping[Any, Any], limits: Any) -> list[list[Any]]:
    """Recorded training responses by batch, in the order in which they were drawn."""
    found = [r for k, r in recorded.items() if k[1] != EVALUATION_VISIT]
    size = limits.prompts_per_step * limits.group_size
    return [found[i : i + size] for i in range(0, len(found) - size + 1, size)]


def _seconds_of_a_batch(engine: Emulated, limits: Any, recorded: Mapping[Any, Any]) -> float:
    """Mean seconds that the emulated accelerator would take for a recorded batch, without sleeping them."""
    total = 0.0
    batches = _batches(recorded, limits)
    for batch in batches:
        left = [float(r.response_length) for r in reversed(batch)]
        running: list[float] = []
        while left or running:
            while left and len(running) < engine.pace.rows:
                running.append(left.pop())
            total += engine.pace.launch_s(len(running))
            running = [n - engine.pace.tokens for n in running if n > engine.pace.tokens]
    return total / len(batches)


def copy_start(ask: Mapping[str, Any], workdir: pathlib.Path) -> None:
    """Puts the warm-started run that the parent made into a fresh folder."""
    if ask.get("start"):
        shutil.copytree(ask["start"], workdir, dirs_exist_ok=True)


def main(argv: list[str]) -> None:
    ask = json.loads(argv[1])
    use_compilation_cache("default", pathlib.Path("."))
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(ask["workdir"] if ask.get("workdir") else folder)
        copy_start(ask, workdir)
        found = emulated(ask, workdir) if ask.get("emulated") else real(ask, workdir)
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv)
