"""How losses bear off-policy data, the central figure of Asynchronous RLHF (arXiv 2410.18252, figures 3 and 4) at small scale.

    python -m experiments.ablations.off_policy --workdir=runs/off_policy --json=off_policy.json
    python -m experiments.ablations.off_policy --workdir=runs/small --steps=8 --seeds=1 --minibatches=1,8 --sft_steps=200

The quickstart's small model is trained on worked examples and answers prompts. A gold reward model learns from the task's own
score which of its answers are better, and a proxy learns from the gold model's labels on other answers, as in the paper. Then each
algorithm trains on the proxy and is judged by the gold model, with N mini-batches per round of generation: the last of them is learnt from N - 1 updates after it was sampled. Whatever N, there are as many completions, as many
optimizer steps, and one learning-rate schedule over the steps. Held-out answers are compared with the trained model's own before RL:
gold win-rate (a tie counts half), and KL to it in nats a response.

`rows`: one line a run. `slopes`: win-rate lost or gained per doubling of N, with a bootstrap interval over runs. A picture lies
beside the JSON. The whole grid is 72 runs of 64 updates: 15 to 40 minutes on two slow cores. The JSON grows with each run; the same
command goes on where it was ended.
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

from adrl_jax.learner import packing
from adrl_jax.learner.update import LearnerState, make_log_probs, policy_params
from adrl_jax.rewards import judging
from adrl_jax.rollout.engine import Engine
from adrl_jax.runtime import collect, cursor, numbers, publish
from adrl_jax.runtime.parts import EVALUATION_VISIT, Parts
from adrl_jax.types import SamplingParams
from experiments import build, config, presets, reward_config, reward_model
from experiments.ablations import common, plots
from experiments.ablations.rows import Rows
from experiments.bench import form
from experiments.bench.sides import say
from experiments.config import Config
from experiments.configs import quickstart
from experiments.figures import MUTED
from experiments.schema import ConfigError
from experiments.train import use_compilation_cache

ALGORITHMS = {"ppo": 1, "prox_rloo": 2, "online_dpo": 2, "bon_sft": 2}
"""Algorithm -> completions of a prompt."""

KEYS = ("algorithm", "N", "seed")

ROW_LENGTH = 224  # holds the longest pair of the task
VISITS = 1_000_000  # a seed's visits: no two seeds share noise


@dataclasses.dataclass(frozen=True)
class Study:
    """Attributes: completions an optimizer step; steps of each run; rate, the peak learning rate; sft_steps; pairs_prompts, prompts
    whose answers gold model and proxy learn from; gold_steps, proxy_steps; eval_prompts; seed of what all runs share."""

    completions: int = 32
    steps: int = 64
    rate: float = 2e-4
    sft_steps: int = 600
    pairs_prompts: int = 4096
    gold_steps: int = 500
    proxy_steps: int = 500
    eval_prompts: int = 256
    seed: int = 0


def base_config(study: Study) -> Any:
    """The quickstart's task and model, without speculation."""
    c = quickstart.get_config()
    c.seed = study.seed
    c.task.eval_prompts = study.eval_prompts
    c.warm_start.steps = study.sft_steps
    c.rollout.strategies = ("off",)
    c.rollout.batch_buckets = (16, 64)
    c.learner.row_length, c.learner.row_multiple, c.learner.microbatch_rows = ROW_LENGTH, 8, 4
    c.learner.target_multiple = ROW_LENGTH
    return c


def prepare(study: Study, workdir: pathlib.Path) -> tuple[Config, dict[str, float]]:
    """Trains policy, gold model and proxy into `workdir` (or finds them there); returns settings that start from them, and the proxy's record."""
    c = base_config(study)
    settings = config.freeze(c)
    started = common.start(settings, workdir)
    proxy = workdir / "proxy"
    for number, (name, gold, steps) in enumerate((("gold", "", study.gold_steps), ("proxy", "gold", study.proxy_steps))):
        if (workdir / name / "reward_model.json").exists():
            continue
        (workdir / name).mkdir(parents=True, exist_ok=True)
        r = reward_config.get_config()
        r.preferences.prompts, r.training.steps = study.pairs_prompts, steps
        r.preferences.gold = gold and str(workdir / gold)
        r.preferences.max_new_tokens = settings.train.max_new_tokens
        frozen = dataclasses.replace(
            reward_config.schema.build(reward_config.RewardConfig, r),
            seed=study.seed + number,  # other answers
            task=started.task,
            model=started.model,
        )
        reward_config.check(frozen)
        reward_model.run(frozen, workdir / name)
    record = reward_model.reward_model.load(proxy).record
    return dataclasses.replace(started, task=dataclasses.replace(started.task, reward_model=str(proxy))), record


def settings_of(study: Study, started: Config, algorithm: str) -> Config:
    """The settings of an algorithm's runs, with one mini-batch a round."""
    c = config.schema.editable(started)
    c.learner.learning_rate, c.learner.schedule, c.learner.warmup_steps = study.rate, "linear", 0
    presets.apply(c, algorithm)
    c.train.group_size = ALGORITHMS[algorithm]
    c.train.prompts_per_step = study.completions // ALGORITHMS[algorithm]
    c.train.steps = study.steps
    c.learner.row_length = ROW_LENGTH
    if algorithm == "ppo":
        c.learner.value_init, c.learner.value_learning_rate = started.task.reward_model, study.rate
    return config.freeze(c)


class Runs:
    """The runs of one algorithm: parts built once, an engine that all algorithms share."""

    def __init__(self, study: Study, settings: Config, parts: Parts, engine: Engine):
        self.study, self.settings = study, settings
        self.parts = dataclasses.replace(parts, engine=engine)
        self.sampling = SamplingParams(temperature=settings.sampling.temperature)
        self.log_probs = make_log_probs(
            parts.model_config, temperature=settings.sampling.temperature, valid_vocab=parts.tokenizer.size
        )

    def publish(self, params: Any, version: int) -> None:
        shot = publish.snapshot(params, version, self.parts.model_config)
        self.parts.engine.publish(shot.params, shot.version)

    def run(self, minibatches: int, seed: int) -> LearnerState:
        """Trains with that many mini-batches a round; returns the learner at the end."""
        parts, t = self.parts, self.settings.train
        stage = parts.prepare
        own = type(stage)(
            dataclasses.replace(stage.config, minibatches=minibatches),
            stage.advantage,
            stage.pack,
            stage.log_probs,
            stage.scalars,
        )
        learner = parts.init_learner()
        at = cursor.init(seed, len(parts.train_prompts))
        for step in range(1, self.study.steps // minibatches + 1):
            self.publish(policy_params(learner), int(learner.version))
            indices, visits, at = cursor.draw(at, minibatches * t.prompts_per_step)
            prompts = [parts.train_prompts[int(i)] for i in indices]
            requests = collect.requests_for(prompts, visits + (seed + 1) * VISITS, t.group_size, t.max_new_tokens)
            result = parts.engine.generate(requests, self.sampling, parts.bandit, parts.bandit.init())
            scored = collect.score(result.rollouts, [r.prompt for r in requests], parts.tokenizer, parts.scorer)
            prepared = own(learner, scored, step)
            learner = prepared.learner
            for batch in prepared.batches:
                learner, values = parts.update(learner, batch)
            numbers.on_host(values)  # waits
        return learner

    def answers(self, params: Any) -> tuple[np.ndarray, list[Any]]:
        """Gold rewards of answers to held-out prompts, always with the same noise, and the rollouts."""
        parts = self.parts
        self.publish(params, 0)
        prompts = list(parts.eval_prompts)
        requests = collect.requests_for(prompts, [EVALUATION_VISIT] * len(prompts), 1, self.settings.train.max_new_tokens)
        result = parts.engine.generate(requests, self.sampling, parts.bandit, parts.bandit.init())
        scored = collect.score(result.rollouts, prompts, parts.tokenizer, parts.eval_scorer)
        return scored.rewards, list(result.rollouts)

    def divergence(self, start: Any, rollouts: Sequence[Any]) -> judging.Estimate:
        """KL to the policy before RL, nats a response, of what the trained one sampled."""
        sizes = dict(row_length=ROW_LENGTH, row_multiple=8, target_multiple=ROW_LENGTH)
        batch = packing.pack(rollouts, np.zeros(len(rollouts)), **sizes)
        reference = packing.unpack_targets(batch, self.log_probs(start, batch)[0], len(rollouts))
        return judging.divergence([r.log_probs for r in rollouts], reference)

    def measured(self, minibatches: int, seed: int, start: Any, before: np.ndarray) -> dict[str, Any]:
        """One run, compared with the policy `start`, whose gold rewards are `before`."""
        began = time.monotonic()
        learner = self.run(minibatches, seed)
        after, rollouts = self.answers(policy_params(learner))
        won, kl = judging.win_rate(after, before), self.divergence(start, rollouts)
        return {
            "win_rate": won.value,
            "win_rate_low": won.low,
            "win_rate_high": won.high,
            "kl": kl.value,
            "gold": float(after.mean()),
            "gold_before": float(before.mean()),
            "updates": int(learner.version),
            "seconds": time.monotonic() - began,
        }


def slopes(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Win-rate per doubling of N, by algorithm, where there are at least two N."""
    out = {}
    for name in dict.fromkeys(r["algorithm"] for r in rows):
        own = [r for r in rows if r["algorithm"] == name]
        doublings, rates = np.log2([r["N"] for r in own]), [r["win_rate"] for r in own]
        if len(set(doublings)) > 1:
            found = judging.slope(doublings, np.array(rates))
            out[name] = {"slope": found.value, "low": found.low, "high": found.high}
    return out


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean win-rate (and KL) of each algorithm and N."""
    counts = sorted({r["N"] for r in rows})
    lines = ["algorithm    " + "".join(f"{'N=' + str(n):>16}" for n in counts)]
    for name in dict.fromkeys(r["algorithm"] for r in rows):
        cells = []
        for n in counts:
            own = [r for r in rows if r["algorithm"] == name and r["N"] == n]
            text = f"{np.mean([r['win_rate'] for r in own]):.3f} ({np.mean([r['kl'] for r in own]):.2f})" if own else ""
            cells.append(f"{text:>16}")
        lines.append(f"{name:<13}" + "".join(cells))
    return "\n".join(lines)


def plot(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> pathlib.Path:
    """Gold win-rate against N with 95 % bands over seeds, and against KL (a line joins the means of growing N)."""
    counts = sorted({r["N"] for r in rows})
    with plots.style():
        figure = Figure(figsize=(9, 3.9), layout="constrained")
        by_count, by_kl = figure.subplots(1, 2, sharey=True)
        for name, color in zip(dict.fromkeys(r["algorithm"] for r in rows), plots.COLORS):
            own = [[r for r in rows if (r["algorithm"], r["N"]) == (name, n)] for n in counts]
            plots.band(by_count, range(len(counts)), [[r["win_rate"] for r in g] for g in own], color, name.replace("_", " "))
            there = [g for g in own if g]
            kl, rate = ([np.mean([r[key] for r in g]) for g in there] for key in ("kl", "win_rate"))
            by_kl.plot(kl, rate, color=color, alpha=0.35, linewidth=1)
            by_kl.scatter(kl, rate, s=[14 + 10 * np.log2(g[0]["N"]) for g in there], color=color)
        by_count.set_xticks(range(len(counts)), [str(n) for n in counts])
        by_count.set(xlabel="N, mini-batches a round of generation", ylabel="gold win-rate against the start")
        by_kl.set(xlabel="KL to the start, nats a response (larger points: larger N)")
        for ax in (by_count, by_kl):
            ax.axhline(0.5, color=MUTED, linewidth=1, linestyle=":")
            ax.grid(True, axis="y")
        plots.legend(figure, by_count)
        return plots.save(figure, path)


def study_rows(study: Study, workdir: pathlib.Path, rows: Rows) -> dict[str, float]:
    """Adds all rows that are missing; returns the proxy's record."""
    began = time.monotonic()
    started, record = prepare(study, workdir)
    say(f"policy and proxy: {time.monotonic() - began:.0f} s, proxy accuracy {record['accuracy']:.3f}")
    engine, before = None, None
    for algorithm in dict.fromkeys(name for name, _, _ in rows.missing):
        settings = settings_of(study, started, algorithm)
        with build.opened(settings) as parts:
            parts = dataclasses.replace(parts, eval_scorer=build.judge(settings, str(workdir / "gold")))
            engine = parts.engine if engine is None else engine
            runs = Runs(study, settings, parts, engine)
            start = jax.tree.map(np.array, policy_params(parts.init_learner()))
            before = runs.answers(start)[0] if before is None else before
            for _, count, seed in [key for key in rows.missing if key[0] == algorithm]:
                row = {"algorithm": algorithm, "N": count, "seed": seed, **runs.measured(count, seed, start, before)}
                rows.add(row, f"{algorithm} N={count} seed {seed}: win-rate {row['win_rate']:.3f}, KL {row['kl']:.2f}")
    return record


def main(argv: Sequence[str] | None = None) -> dict:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flags.add_argument(
        "--workdir", type=pathlib.Path, default=pathlib.Path("runs/off_policy"), help="folder of the shared policy and proxy"
    )
    flags.add_argument("--json", default=None, metavar="FILE", help="write the form to this file, a picture beside it")
    flags.add_argument("--algorithms", default=",".join(ALGORITHMS), help="which, separated by commas")
    flags.add_argument("--minibatches", default="1,2,4,8,16,32", help="the values of N; each divides --steps")
    flags.add_argument("--seeds", type=int, default=3, help="runs of each")
    for field in dataclasses.fields(Study):
        flags.add_argument(f"--{field.name}", type=type(field.default), default=field.default, help="see `Study`")
    args = flags.parse_args(argv)
    algorithms = common.chosen(flags, "algorithms", args.algorithms, tuple(ALGORITHMS))
    counts = common.numbers(args.minibatches)
    for n in counts:
        if n < 1 or args.steps % n:
            flags.error(f"minibatches={n} must divide steps={args.steps}, so that every N makes as many updates")
    names = tuple(f.name for f in dataclasses.fields(Study))
    study = Study(**{name: getattr(args, name) for name in names})
    asked = {**vars(args), "workdir": ""}
    wanted = [(a, n, seed) for a in algorithms for n in counts for seed in range(args.seeds)]
    try:
        use_compilation_cache("default", args.workdir)
        rows = Rows("off_policy", args.json, asked, same=names, keys=KEYS, wanted=wanted)
        record = study_rows(study, args.workdir, rows)
    except ConfigError as error:
        flags.error(str(error))
    print(table(rows.rows))
    results = {"rows": rows.rows, "slopes": slopes(rows.rows)}
    results |= {"proxy_accuracy": record["accuracy"], "proxy_ece": record["ece"]}
    if args.json:
        results["plot"] = plot(rows.rows, pathlib.Path(args.json).with_suffix(".svg")).name
    return form.finish("off_policy", asked, results, args.json)


if __name__ == "__main__":
    main()
