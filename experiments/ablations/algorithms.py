"""Does every preset learn? Each one trains the quickstart's small model from the same supervised start; one table.

    python -m experiments.ablations.algorithms --workdir=runs/algorithms --json=algorithms.json
    python -m experiments.ablations.algorithms --workdir=runs/algorithms --presets=grpo,gspo --steps=30

`rows`: preset, held-out reward before and after (the same prompts and noise), their difference with a bootstrap interval over prompts, and
whether the interval lies above 0.
"""

import argparse
import dataclasses
import pathlib
import time
from typing import Any

import jax
import numpy as np

from adrl_jax.learner.update import policy_params
from adrl_jax.rewards import judging
from adrl_jax.runtime import collect, cursor, numbers, refill
from experiments import build, config, learner_rules, presets, schema, sft
from experiments.ablations.off_policy import ROW_LENGTH, Runs, Study, base_config
from experiments.bench import form
from experiments.bench.sides import say
from experiments.config import Config

WIDE_ROW = 1024  # holds a group of eight of this task


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


def train(runs: Runs, steps: int) -> Any:
    """Synchronous steps with refills where the preset asks for them; returns the learner."""
    parts, c = runs.parts, runs.settings
    sizes = c.train
    count = learner_rules.prompts_per_step(c)
    learner, at = parts.init_learner(), cursor.init(0, len(parts.train_prompts))
    for step in range(1, steps + 1):
        runs.publish(policy_params(learner), int(learner.version))
        scored, refills = None, 0
        while True:
            indices, visits, at = cursor.draw(at, count)
            prompts = [parts.train_prompts[int(i)] for i in indices]
            requests = collect.requests_for(prompts, visits, sizes.group_size, sizes.max_new_tokens)
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


def main(argv=None) -> dict:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flags.add_argument(
        "--workdir", type=pathlib.Path, required=True, help="folder of the shared start; taken from there if present"
    )
    flags.add_argument("--json", default=None, metavar="FILE", help="write the form to this file")
    flags.add_argument("--presets", default=",".join(presets.PRESETS), help="which, separated by commas")
    flags.add_argument("--steps", type=int, default=40, help="optimizer steps of each")
    flags.add_argument("--rate", type=float, default=2e-4, help="learning rate of all")
    flags.add_argument("--sft_steps", type=int, default=600, help="supervised updates of the start")
    flags.add_argument("--eval_prompts", type=int, default=256, help="held-out prompts")
    args = flags.parse_args(argv)
    unknown = [name for name in args.presets.split(",") if name not in presets.PRESETS]
    if unknown:
        flags.error(f"presets={','.join(unknown)} unknown; choose of {', '.join(presets.PRESETS)}")
    study = Study(sft_steps=args.sft_steps, eval_prompts=args.eval_prompts)
    start = config.freeze(base_config(study))
    if not (args.workdir / "sft" / "sft.json").exists():
        (args.workdir / "sft").mkdir(parents=True, exist_ok=True)
        sft.run(start, args.workdir / "sft")
    started = sft.of_source(start, args.workdir / "sft")
    rows, engine = [], None
    for name in args.presets.split(","):
        settings = settings_of(started, name, args.steps, args.rate)
        with build.opened(settings) as parts:
            parts = dataclasses.replace(parts, eval_scorer=parts.scorer)
            engine = parts.engine if engine is None else engine
            runs = Runs(study, settings, parts, engine)
            before, _ = runs.answers(jax.tree.map(np.array, policy_params(parts.init_learner())))
            began = time.monotonic()
            learner = train(runs, args.steps)
            after, _ = runs.answers(policy_params(learner))
            gain = judging.bootstrap(after - before)
            rows.append(
                {
                    "preset": name,
                    "before": float(before.mean()),
                    "after": float(after.mean()),
                    "gain": gain.value,
                    "gain_low": gain.low,
                    "gain_high": gain.high,
                    "learns": gain.low > 0,
                    "seconds": time.monotonic() - began,
                }
            )
            say(
                f"{name:<18} {before.mean():.3f} -> {after.mean():.3f}  gain {gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
            )
    return form.finish("algorithms", {**vars(args), "workdir": ""}, {"rows": rows}, args.json)


if __name__ == "__main__":
    main()
