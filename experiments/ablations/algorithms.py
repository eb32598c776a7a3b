"""Does every preset learn? Each one trains the quickstart's small model from the same supervised start; one table.

    python -m experiments.ablations.algorithms --json=algorithms.json
    python -m experiments.ablations.algorithms --presets=grpo,gspo --steps=30 --seeds=1

`rows`: preset, seed, held-out reward before and after (the same prompts and noise), their difference with a bootstrap interval over prompts, and
whether the interval lies above 0. `gains`: the mean over seeds by preset, with a 95 % t interval over them. A picture lies beside the JSON.

84 runs of 40 updates: 15 to 30 minutes on two slow cores. The JSON grows with each run; the same command goes on where it was ended. With
`--workdir=runs/off_policy` the supervised start of that study serves here too.
"""

import argparse
import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from adrl_jax.learner.update import policy_params
from adrl_jax.rewards import judging
from adrl_jax.runtime import collect, cursor, numbers, refill
from experiments import build, config, learner_rules, presets, schema
from experiments.ablations import common, plots
from experiments.ablations.off_policy import ROW_LENGTH, VISITS, Runs, Study, base_config
from experiments.ablations.rows import Rows
from experiments.bench import form
from experiments.config import Config
from experiments.figures import MUTED, OTHER, OURS
from experiments.schema import ConfigError
from experiments.train import use_compilation_cache

WIDE_ROW = 1024  # holds a group of eight of this task
SAME = ("steps", "rate", "sft_steps", "eval_prompts")


def settings_of(started: Config, name: str, steps: int, rate: float) -> Config:
    """A preset's run: the preset's own fields, 8 prompts of 8 responses (1 x 64 for the value model's, 2 for the paper's)."""
    c = schema.editable(started)
    c.train.prompts_per_step, c.train.group_size = 8, 8
    c.learner.learning_rate = rate
    presets.apply(c, name)
    c.train.steps = steps
    grouped = c.learner.aggregation == "group" and c.learner.surrogate == "copg"
    c.learner.row_length = c.learner.target_multiple = WIDE_ROW if grouped else ROW_LENGTH
    if c.learner.advantage == "gae":
        c.learner.value_learning_rate = rate
    return config.freeze(c)


def train(runs: Runs, steps: int, seed: int) -> Any:
    """Synchronous steps with refills where the preset asks for them; returns the learner."""
    parts, c = runs.parts, runs.settings
    sizes = c.train
    count = learner_rules.prompts_per_step(c)
    learner, at = parts.init_learner(), cursor.init(seed, len(parts.train_prompts))
    for step in range(1, steps + 1):
        runs.publish(policy_params(learner), int(learner.version))
        scored, refills = None, 0
        while True:
            indices, visits, at = cursor.draw(at, count)
            prompts = [parts.train_prompts[int(i)] for i in indices]
            requests = collect.requests_for(prompts, visits + (seed + 1) * VISITS, sizes.group_size, sizes.max_new_tokens)
            result = parts.engine.generate(requests, runs.sampling, parts.bandit, parts.bandit.init())
            more = collect.score(result.rollouts, [r.prompt for r in requests], parts.tokenizer, parts.scorer)
            scored = more if scored is None else refill.joined(scored, more)
            if not c.learner.max_refills:
                break
            chosen = refill.enough(scored, count, refills, c.learner.max_refills)
            if chosen is not None:
                scored = chosen
                break
            refills += 1
        prepared = parts.prepare(learner, scored, step)
        learner, batches = prepared.learner, prepared.batches
        for batch in batches:
            learner, values = parts.update(learner, batch)
            numbers.on_host(values)
    return learner


def gains(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By preset: mean gain over seeds, its 95 % interval over them, and whether every single run learns."""
    out = {}
    for name in dict.fromkeys(r["preset"] for r in rows):
        own = [r for r in rows if r["preset"] == name]
        mean, low, high = plots.interval([r["gain"] for r in own])
        out[name] = {"gain": mean, "low": low, "high": high, "learns": all(r["learns"] for r in own)}
    return out


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a preset."""
    found = gains(rows)
    before = np.mean([r["before"] for r in rows])
    lines = [f"held-out reward of the start: {before:.3f}", f"{'preset':<18}{'gain':>8}   95 % over seeds   learns"]
    for name, g in found.items():
        span = f"[{g['low']:+.3f}, {g['high']:+.3f}]"
        lines.append(f"{name:<18}{g['gain']:>+8.3f}   {span:<17} {'yes' if g['learns'] else 'not in every run'}")
    return "\n".join(lines)


def plot(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> pathlib.Path:
    """Gain of each preset: mean and 95 % interval over seeds, a dot a seed."""
    found = gains(rows)
    names = sorted(found, key=lambda name: found[name]["gain"])
    with plots.style():
        figure = Figure(figsize=(6.4, 0.24 * len(names) + 1.0), layout="constrained")
        ax = figure.subplots()
        for y, name in enumerate(names):
            g = found[name]
            ax.plot([g["low"], g["high"]], [y, y], color=OTHER, linewidth=3, solid_capstyle="round", zorder=1)
            each = [r["gain"] for r in rows if r["preset"] == name]
            ax.plot(each, [y] * len(each), ".", color=OURS, alpha=0.5, markersize=5)
            ax.plot(g["gain"], y, "o", color=OURS, markersize=5)
        ax.axvline(0, color=MUTED, linewidth=1, linestyle=":")
        ax.set_yticks(range(len(names)), names)
        ax.set_xlabel("held-out reward gained (dots: seeds; bars: 95 % interval of the mean)")
        ax.grid(True, axis="x")
        return plots.save(figure, path)


def run_all(study: Study, started: Config, steps: int, rate: float, rows: Rows) -> None:
    """Adds all rows that are missing."""
    engine, before = None, None
    for name in dict.fromkeys(name for name, _ in rows.missing):
        settings = settings_of(started, name, steps, rate)
        with build.opened(settings) as parts:
            parts = dataclasses.replace(parts, eval_scorer=parts.scorer)
            engine = parts.engine if engine is None else engine
            runs = Runs(study, settings, parts, engine)
            if before is None:
                before = runs.answers(jax.tree.map(np.array, policy_params(parts.init_learner())))[0]
            for _, seed in [key for key in rows.missing if key[0] == name]:
                began = time.monotonic()
                learner = train(runs, steps, seed)
                after, _ = runs.answers(policy_params(learner))
                gain = judging.bootstrap(after - before)
                row = {
                    "preset": name,
                    "seed": seed,
                    "before": float(before.mean()),
                    "after": float(after.mean()),
                    "gain": gain.value,
                    "gain_low": gain.low,
                    "gain_high": gain.high,
                    "learns": gain.low > 0,
                    "seconds": time.monotonic() - began,
                }
                rows.add(
                    row, f"{name} seed {seed}: {before.mean():.3f} -> {after.mean():.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
                )


def main(argv=None) -> dict:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flags.add_argument(
        "--workdir", type=pathlib.Path, default=pathlib.Path("runs/algorithms"), help="folder of the shared start"
    )
    flags.add_argument("--json", default=None, metavar="FILE", help="write the form to this file, a picture beside it")
    flags.add_argument("--presets", default=",".join(presets.PRESETS), help="which, separated by commas")
    flags.add_argument("--steps", type=int, default=40, help="optimizer steps of each")
    flags.add_argument("--seeds", type=int, default=3, help="runs of each")
    flags.add_argument("--rate", type=float, default=2e-4, help="learning rate of all")
    flags.add_argument("--sft_steps", type=int, default=600, help="supervised updates of the start")
    flags.add_argument("--eval_prompts", type=int, default=256, help="held-out prompts")
    args = flags.parse_args(argv)
    names = common.chosen(flags, "presets", args.presets, tuple(presets.PRESETS))
    common.check_sizes(flags, (), 0, steps=args.steps, seeds=args.seeds)
    study = Study(sft_steps=args.sft_steps, eval_prompts=args.eval_prompts)
    asked = {**vars(args), "workdir": ""}
    wanted = [(name, seed) for name in names for seed in range(args.seeds)]
    try:
        use_compilation_cache("default", args.workdir)
        rows = Rows("algorithms", args.json, asked, same=SAME, keys=("preset", "seed"), wanted=wanted)
        started = common.start(config.freeze(base_config(study)), args.workdir)
        run_all(study, started, args.steps, args.rate, rows)
    except ConfigError as error:
        flags.error(str(error))
    print(table(rows.rows))
    results: dict[str, Any] = {"rows": rows.rows, "gains": gains(rows.rows)}
    if args.json:
        results["plot"] = plot(rows.rows, pathlib.Path(args.json).with_suffix(".svg")).name
    return form.finish("algorithms", asked, results, args.json)


if __name__ == "__main__":
    main()
