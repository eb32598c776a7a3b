"""What `sampling.reuse_noise_across_epochs` costs and gains: `python -m experiments.ablations.noise_reuse --json=F --plot=F.svg`.

A prompt whose samples get the same noise in every epoch is answered as before, except where the policy changed, so the earlier
response is a draft that mostly stands. But once the policy was trained on a response, its noise is no longer Gumbel given the
weights: what comes out leans to what was reinforced. Two experiments:

    toy     one prompt, five tokens, thousands of replicas: REINFORCE with a leave-one-out baseline. The bias is the mean reward
            of an epoch's samples minus the true mean reward of the policy that drew them, which is 0 with fresh noise.
    runs    the quickstart's task on 64 prompts, several epochs, with and without: reward of training samples, held-out reward,
            accept length of drafts from the epoch before, and rollout speed.

The JSON holds `toy` (noise -> a list of epochs: bias, its standard error, true_reward) and `rows` (noise, seed, step, epoch,
reward, accept_length, tokens_per_s), `held_out` (noise -> mean, sd over seeds of the final reward).
"""

import pathlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from adrl_jax.metrics import read_lines
from adrl_jax.runtime import loop
from experiments import build, config, resolve
from experiments.bench import form
from experiments.configs import quickstart
from experiments.figures import MUTED, OTHER, OURS, STYLE

NOISES = ("fresh", "reused")
REWARDS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
PROMPTS, PROMPTS_PER_STEP = 64, 16


def toy(
    reused: bool, *, epochs: int = 12, replicas: int = 20_000, samples: int = 4, learning_rate: float = 2.0, seed: int = 0
) -> list[dict[str, float]]:
    """The five-token experiment, float64; `bias` and `true_reward` are means over replicas before each epoch's update."""
    random = np.random.default_rng(seed)
    logits = np.zeros((replicas, len(REWARDS)))
    noise = random.gumbel(size=(replicas, samples, len(REWARDS)))
    found = []
    for epoch in range(epochs):
        if epoch and not reused:
            noise = random.gumbel(size=noise.shape)
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        drawn = np.argmax(np.log(p)[:, None] + noise, axis=-1)
        reward = REWARDS[drawn]
        true = p @ REWARDS
        gap = reward.mean(1) - true
        found.append(
            {
                "bias": float(gap.mean()),
                "standard_error": float(gap.std(ddof=1) / np.sqrt(replicas)),
                "true_reward": float(true.mean()),
            }
        )
        advantage = (reward - reward.mean(1, keepdims=True)) * samples / (samples - 1)
        score = np.eye(len(REWARDS))[drawn] - p[:, None]
        logits = logits + learning_rate * (advantage[..., None] * score).mean(1)
    return found


def settings(noise: str, seed: int, steps: int, train_prompts: int = PROMPTS) -> config.Config:
    """The quickstart's task and model, four steps an epoch, drafting from the epoch before."""
    c = quickstart.get_config()
    c.seed, c.train.steps = seed, steps
    c.task.train_prompts, c.train.prompts_per_step = train_prompts, PROMPTS_PER_STEP
    c.sampling.reuse_noise_across_epochs = noise == "reused"
    c.rollout.strategies = ("off", "history-d7")
    c.bandit.name, c.bandit.arm = "fixed", "history-d7"
    c.log.compare_repeats, c.log.tensorboard, c.log.report, c.log.samples_per_step = 0, False, False, 0
    c.checkpoint.every, c.evaluation.every = 10_000, steps
    return config.freeze(c)


def run(noise: str, seed: int, steps: int) -> tuple[list[dict[str, Any]], float]:
    """Rows of one training run, and the held-out reward at its end."""
    c = settings(noise, seed, steps)
    with build.opened(c) as parts, tempfile.TemporaryDirectory() as folder:
        loop.run(parts, resolve.loop_config(c), pathlib.Path(folder))
        lines = read_lines(pathlib.Path(folder) / "metrics.jsonl")
    rows = [
        {
            "noise": noise,
            "seed": seed,
            "step": line["step"],
            "epoch": (line["step"] - 1) * PROMPTS_PER_STEP // PROMPTS,
            "reward": line["reward/mean"],
            "accept_length": line.get("spec/accept_len"),
            "tokens_per_s": line["rollout/tokens_per_s"],
        }
        for line in lines
        if line["phase"] == "train"
    ]
    return rows, [line["reward/mean"] for line in lines if line["phase"] == "evaluate"][-1]


def summary(rows: Sequence[dict[str, Any]], ends: dict[str, list[float]]) -> dict[str, Any]:
    """Accept length, speed and reward after the first epoch, and what the held-out reward ends at."""
    later = {n: [r for r in rows if r["noise"] == n and r["epoch"] > 0] for n in ends}

    def mean(noise: str, name: str) -> float | None:
        values = [r[name] for r in later[noise] if r[name] is not None]
        return statistics.mean(values) if values else None

    return {
        "held_out": {
            n: {"mean": statistics.mean(x), "sd": statistics.stdev(x) if len(x) > 1 else 0.0} for n, x in ends.items()
        },
        "accept_length": {n: mean(n, "accept_length") for n in ends},
        "tokens_per_s": {n: mean(n, "tokens_per_s") for n in ends},
        "train_reward": {n: mean(n, "reward") for n in ends},
    }


def plot(toys: dict[str, list[dict[str, float]]], rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """The toy's bias, and reward and accept length of the runs, by epoch or step."""
    colors = {"fresh": OTHER, "reused": OURS}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 2.8), layout="constrained")
        axes = figure.subplots(1, 3)
        for noise, epochs in toys.items():
            axes[0].plot([e["bias"] for e in epochs], label=noise, color=colors[noise], linewidth=1.8)
        axes[0].set_title("five tokens: samples' reward − true reward")
        axes[0].set_xlabel("epoch", color=MUTED)
        for ax, name, title in ((axes[1], "reward", "reward of training samples"), (axes[2], "accept_length", "accept length")):
            for noise in NOISES:
                steps = sorted({r["step"] for r in rows if r["noise"] == noise})
                at = [[r[name] for r in rows if (r["noise"], r["step"]) == (noise, s) and r[name] is not None] for s in steps]
                kept = [(s, statistics.mean(v)) for s, v in zip(steps, at) if v]
                if kept:
                    ax.plot(*zip(*kept), label=noise, color=colors[noise], linewidth=1.8)
            ax.set_title(title)
            ax.set_xlabel("step", color=MUTED)
        for ax in axes:
            ax.grid(True, axis="y")
        axes[0].legend()
        figure.savefig(path, facecolor="white", metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)


def main(argv: Sequence[str] | None = None) -> dict:
    parser = form.parser(__doc__)
    parser.add_argument("--steps", type=int, default=24, help="training steps of a run, four an epoch")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind; 0 for the toy alone")
    parser.add_argument("--replicas", type=int, default=20_000, help="of the toy")
    parser.add_argument("--plot", type=pathlib.Path, default=None, metavar="FILE", help="draw to this file")
    args = parser.parse_args(argv)
    toys = {noise: toy(noise == "reused", replicas=args.replicas) for noise in NOISES}
    rows: list[dict[str, Any]] = []
    ends: dict[str, list[float]] = {noise: [] for noise in NOISES}
    for seed in range(args.seeds):
        for noise in NOISES:
            found, end = run(noise, seed, args.steps)
            rows += found
            ends[noise].append(end)
    results = {"toy": toys, "rows": rows, **(summary(rows, ends) if args.seeds else {})}
    if args.plot:
        plot(toys, rows, args.plot)
    return form.finish("noise_reuse", vars(args), results, args.json)


if __name__ == "__main__":
    main()
