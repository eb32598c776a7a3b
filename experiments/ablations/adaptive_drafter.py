"""A drafter that stays as it was against one that learns along, while RL moves the policy.

python -m experiments.ablations.adaptive_drafter --workdir=runs/adaptive --json=adaptive.json --plot=docs/adaptive.svg
                                                                                          (--small for a look)

The quickstart's policy and a drafter, which Muon trains, are warm-started together, once. From there two runs of the same RL follow, with
`drafter.when=off` and with `--adaptive` (joint). Both draft in every launch, with the same arm. Coupled verification draws the
same tokens whatever the drafter, so both policies are the same at every step up to rounding (the drafter's loss makes the learner
another program; `same_policy` tells whether every bit agrees), and whatever differs is the drafter's doing.
Figures are accept lengths over the last `--last` steps; the plot has one line a run by step, and a dot a launch, which fall where a
new policy meets the drafter of the one before.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import tempfile
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from adrl_jax.metrics import read_lines
from adrl_jax.runtime import loop
from experiments import build, config, figures, resolve, schema
from experiments.ablations import common
from experiments.bench import form
from experiments.config import Config
from experiments.configs import quickstart
from experiments.schema import ConfigError

SMALL = {
    "warm_start.steps": 20,
    "warm_start.examples": 512,
    "task.train_prompts": 64,
    "task.eval_prompts": 8,
    "train.prompts_per_step": 4,
    "learner.row_multiple": 8,
    "rollout.max_batch": 16,
    "rollout.batch_buckets": (4, 16),
}


def settings(when: str, steps: int, depth: int, changes: dict[str, Any]) -> Config:
    """The quickstart with one arm that always drafts.

    Raises:
        ConfigError: a setting cannot be used.
    """
    c = quickstart.get_config()
    c.rollout.strategies = ("off", f"eagle-d{depth}")
    c.bandit.name, c.bandit.arm = "fixed", f"eagle-d{depth}"
    # A policy that moves far in few steps, and an optimizer with which the drafter follows it in as few.
    c.learner.learning_rate = 6e-4
    c.drafter.optimizer, c.drafter.learning_rate = "muon", 3e-3
    c.train.steps, c.drafter.when = steps, when
    c.log.compare_repeats, c.log.report, c.log.tensorboard, c.log.samples_per_step = 0, False, False, 0
    common.update(c, changes)
    return config.freeze(c)


def run(c: Config, workdir: pathlib.Path) -> None:
    """Runs, or goes on with, one run; more steps are a setting that may change on the way.

    Raises:
        ConfigError: what is in `workdir` was made with other settings.
        RuntimeError: it was asked to stop.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    saved = workdir / "config.json"
    if saved.exists():
        for path, old, new in schema.differences(config.load(saved), c):
            if path != "train.steps":
                raise ConfigError(
                    f"--workdir: {workdir} was made with {path}={old!r}, this run has {new!r}; name another folder"
                )
    config.save(c, saved)
    with contextlib.ExitStack() as stack:
        parts = stack.enter_context(build.opened(c))
        if loop.run(parts, resolve.loop_config(c), workdir).status == "stopped":
            raise RuntimeError(f"stopped; the same command with --workdir={workdir.parent} goes on")


def series(workdir: pathlib.Path) -> dict[str, list[float]]:
    """By training step: accept length, rewards, and the learner's fingerprints; and accept lengths of all launches."""
    rows = [r for r in read_lines(workdir / "metrics.jsonl") if r["phase"] == "train"]
    arms = read_lines(workdir / "arms.jsonl")
    launches = [
        (line["step"] + (k + 0.5) / len(line["arms"]) - 1, tokens / passes)
        for line in arms
        for k, (passes, tokens) in enumerate(zip(line["accept_passes"], line["accept_tokens"]))
        if passes
    ]
    return {
        "steps": [r["step"] for r in rows],
        "accept": [r["spec/accept_len"] for r in rows],
        "reward": [r["reward/mean"] for r in rows],
        "fingerprints": [r["fingerprint"] for r in rows],
        "launches": launches,
    }


def plot(found: dict[str, dict[str, Any]]) -> Figure:
    """Accept length of both runs over RL steps, and the reward they share."""
    figure = Figure(figsize=(9, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, color in (("frozen", figures.MUTED), ("adaptive", figures.OURS)):
        x, y = zip(*found[name]["launches"])
        left.plot(x, y, ".", color=color, alpha=0.15, markersize=3)
        left.plot(np.array(found[name]["steps"]) - 0.5, found[name]["accept"], color=color, label=name, linewidth=1.8)
        right.plot(found[name]["steps"], found[name]["reward"], color=color, label=name, linewidth=1.4)
    left.set(title="Tokens a verify pass", xlabel="RL step")
    right.set(title="Reward", xlabel="RL step")
    for ax in (left, right):
        ax.grid(True, axis="y")
        ax.legend()
    return figure


def _series_of_both(args: Any, changes: dict[str, Any], steps: int, extra: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`series` of the frozen and of the adaptive run, both from one start; `extra` is for the adaptive one alone."""
    runs = {"frozen": settings("off", steps, args.depth, changes)}
    runs["adaptive"] = settings(args.adaptive, steps, args.depth, changes | extra)

    with contextlib.ExitStack() as stack:
        root = pathlib.Path(args.workdir or stack.enter_context(tempfile.TemporaryDirectory()))
        start = dataclasses.replace(runs["frozen"], train=dataclasses.replace(runs["frozen"].train, steps=0))
        run(start, root / "start")
        found = {}
        for name, c in runs.items():
            if not (root / name).exists():
                shutil.copytree(root / "start", root / name, ignore=shutil.ignore_patterns("config.json"))
            run(c, root / name)
            found[name] = series(root / name)
    return found


def main(argv=None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--workdir", default=None, help="kept, and gone on with; default: a temporary folder")
    parser.add_argument("--plot", default=None, metavar="FILE", help="write the picture, .svg or .png")
    parser.add_argument("--steps", type=int, default=60, help="RL steps")
    parser.add_argument("--depth", type=int, default=5, help="drafted tokens a pass")
    parser.add_argument("--last", type=int, default=5, help="steps that count as the end")
    parser.add_argument("--adaptive", default="joint", choices=("joint", "on_demand", "spot"), help="of the adaptive run")
    parser.add_argument("--learning_rate", type=float, default=None, help="the policy's; default 6e-4, twice the quickstart's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--changes", default="{}", help="JSON of config fields to change in both runs")
    parser.add_argument("--small", action="store_true", help="a minute, to see that it runs; figures mean nothing")
    args = parser.parse_args(argv)
    changes: dict[str, Any] = {"seed": args.seed, **(SMALL if args.small else {}), **common.changes(parser, args.changes)}
    if args.learning_rate is not None:
        changes["learner.learning_rate"] = args.learning_rate
    steps = min(args.steps, 3) if args.small else args.steps
    extra = {"drafter.spot_steps": 8} if args.adaptive == "spot" else {}
    try:
        found = _series_of_both(args, changes, steps, extra)
    except ConfigError as error:
        parser.error(str(error))
    last = {name: float(np.mean(x["accept"][-args.last :])) for name, x in found.items()}
    results = {
        "accept_length_frozen_end": last["frozen"],
        "accept_length_adaptive_end": last["adaptive"],
        "adaptive_over_frozen": last["adaptive"] / last["frozen"],
        "accept_length_start": found["frozen"]["accept"][0],
        "reward_start": found["frozen"]["reward"][0],
        "reward_end": float(np.mean(found["frozen"]["reward"][-args.last :])),
        "same_policy": found["frozen"]["fingerprints"] == found["adaptive"]["fingerprints"],
        "accept_length_frozen": found["frozen"]["accept"],
        "accept_length_adaptive": found["adaptive"]["accept"],
    }
    if args.plot:
        with matplotlib.rc_context(figures.STYLE):
            plot(found).savefig(args.plot, facecolor="white")
    return form.finish("adaptive_drafter", vars(args), results, args.json)


if __name__ == "__main__":
    main()
