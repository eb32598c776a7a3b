"""Draws the README's pictures from measured numbers only: `python -m experiments.figures`.

What is drawn lies in docs/measured/ and comes from these commands:

    python -m experiments.bench.rollout --model=smollm2 --peer=hf,tunix --peer_python=… --json=docs/measured/rollout.json
    python -m experiments.bench.step --model=smollm2 --peer=trl,tunix --peer_python=… --json=docs/measured/step.json
    python -m experiments.bench.rollout --workload=longtail --drafter=… --data=… --peer=hf --json=docs/measured/longtail.json
    python -m experiments.bench.rollout --workload=grid --drafter=… --data=… --json=docs/measured/grid.json
    make quickstart, then: cp runs/quickstart/summary.json docs/measured/quickstart.json
                           grep -v warm_start runs/quickstart/metrics.jsonl > docs/measured/quickstart.jsonl

A picture whose numbers are not there is not drawn.
"""

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adrl_jax.metrics import read_lines

DOCS = pathlib.Path(__file__).parents[1] / "docs"
INK, MUTED, GRID, OURS, OTHER, ACCENT = "#1c2330", "#6b7483", "#e7eaf0", "#2f6fed", "#c3cad6", "#e8833a"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "adrl",
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#c9cfd9",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": GRID,
    "legend.frameon": False,
}
BARS = {
    "rollout.json": (
        ("16 requests × 64 tokens, tokens/s", "_16"),
        ("1 request × 128 tokens, tokens/s", "_1"),
        (
            ("with speculation", "spec_tokens_per_s"),
            ("plain", "plain_tokens_per_s"),
            ("Tunix", "tunix_tokens_per_s"),
            ("Hugging Face", "hf_tokens_per_s"),
        ),
    ),
    "step.json": (
        ("GRPO step, 4 prompts × 4 × 64 tokens, seconds", "_4x4x64"),
        ("GRPO step, 1 prompt × 4 × 256 tokens, seconds", "_1x4x256"),
        (("adrl-jax", "step_s"), ("Tunix", "tunix_step_s"), ("TRL", "trl_step_s")),
    ),
}


def bars(results: Mapping[str, Any], name: str) -> Figure:
    """Two panels of horizontal bars, ours in colour; a figure that was not measured has no bar."""
    left, right, sides = BARS[name]
    figure = Figure(figsize=(9, 0.45 * len(sides) + 0.8), layout="constrained")
    for ax, (title, suffix) in zip(figure.subplots(1, 2), (left, right)):
        found = {label: results[key + suffix] for label, key in sides if results.get(key + suffix) is not None}
        ours = {"with speculation", "plain", "adrl-jax"}
        _bars(ax, found, [OURS if label in ours else OTHER for label in found], title)
    return figure


def _bars(ax: Axes, values: Mapping[str, float], colors: Any, title: str, fmt: str = "%.3g") -> None:
    """Horizontal bars, the first on top, each with its number."""
    drawn = ax.barh(list(values), list(values.values()), color=colors, height=0.62)
    ax.bar_label(drawn, fmt=fmt, padding=4, color=INK)
    ax.invert_yaxis()
    ax.set_title(title)
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)
    ax.margins(x=0.15)


def quickstart(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Reward by step, and the tail of one rollout with and without speculation."""
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    reward, tail = figure.subplots(1, 2)
    for phase, style in (("train", dict(color=OURS)), ("evaluate", dict(color=ACCENT, marker="o", linestyle="--"))):
        points = [(r["step"], r["reward/mean"]) for r in rows if r["phase"] == phase and r.get("reward/mean") is not None]
        if points:
            label = {"train": "rollouts", "evaluate": "held-out prompts"}[phase]
            reward.plot(*zip(*points), label=label, linewidth=1.6, **style)
    reward.set(title="Reward", xlabel="step")
    _running(tail, summary.get("running_off"), MUTED, "without speculation")
    _running(tail, summary.get("running"), OURS, "with speculation")
    tail.set(title="Requests running in one rollout, the same tokens", xlabel="seconds")
    for ax in (reward, tail):
        ax.grid(True, axis="y")
        ax.legend(frameon=True, framealpha=0.85, edgecolor="none")
    return figure


def longtail(results: Mapping[str, Any]) -> Figure:
    """Seconds of the long-tailed rollout, ours in colour, and the strategies' shares of goodput's time."""
    sides = {
        "goodput chooses": results["goodput_s"],
        "BEG chooses": results["beg_s"],
        f"best fixed ({results['best_fixed_arm']})": results["best_fixed_s"],
        "plain": results["plain_s"],
        "llama.cpp": results.get("llamacpp_s"),
        "Hugging Face": results.get("hf_s"),
    }
    found = {label: value for label, value in sides.items() if value is not None}
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    colors = [OTHER if label in ("llama.cpp", "Hugging Face") else OURS for label in found]
    _bars(left, found, colors, "32 requests of 32 to 512 tokens, seconds")
    shares = {name: 100 * share for name, share in results["goodput_arms"].items() if share > 0}
    _bars(right, shares, OURS, "what goodput spends its time with", "%.0f %%")
    return figure


def grid(results: Mapping[str, Any]) -> Figure:
    """Speed over plain decoding by batch: every fixed strategy in grey, the controller in colour."""
    speed = {(c["arm"], c["batch"]): c["tokens_per_s"] for c in results["cells"]}
    batches = sorted({batch for _, batch in speed})
    figure = Figure(figsize=(9, 3.0), layout="constrained")
    ax = figure.subplots()
    for arm in dict.fromkeys(arm for arm, _ in speed):
        chosen = arm == "goodput"
        over = [speed[arm, b] / speed["off", b] for b in batches]
        style = dict(color=OURS, linewidth=2.4, marker="o", zorder=3) if chosen else dict(color=OTHER, linewidth=1.4)
        ax.plot(range(len(batches)), over, **style)
        ax.annotate(arm, (len(batches) - 1, over[-1]), (6, -3), textcoords="offset points", color=OURS if chosen else MUTED)
    ax.set(
        title="Tokens/s over plain decoding", xlabel="requests in the batch", xticks=range(len(batches)), xticklabels=batches
    )
    ax.grid(True, axis="y")
    return figure


def _running(ax: Axes, points: Sequence[Sequence[float]] | None, color: str, label: str) -> None:
    if points:
        seconds, running = zip(*points)
        ax.step(seconds, running, where="post", color=color, label=label, linewidth=1.6)
        ax.fill_between(seconds, running, step="post", color=color, alpha=0.1)


def draw(measured: pathlib.Path, folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes every picture whose numbers are in `measured`; returns what was written."""
    figures: dict[str, Figure] = {}
    for name in BARS:
        if (measured / name).exists():
            figures[pathlib.Path(name).stem] = bars(json.loads((measured / name).read_text())["results"], name)
    for name, figure_of in (("longtail", longtail), ("grid", grid)):
        if (measured / f"{name}.json").exists():
            figures[name] = figure_of(json.loads((measured / f"{name}.json").read_text())["results"])
    if (measured / "quickstart.json").exists():
        summary = json.loads((measured / "quickstart.json").read_text())
        figures["quickstart"] = quickstart(summary, read_lines(measured / "quickstart.jsonl"))
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        written.append(folder / f"{name}.svg")
        figure.savefig(written[-1], facecolor="white", metadata={"Date": None, "Creator": None})
    return written


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--measured", type=pathlib.Path, default=DOCS / "measured", help="folder of the numbers")
    flags.add_argument("--out", type=pathlib.Path, default=DOCS, help="folder of the pictures")
    args = flags.parse_args()
    with matplotlib.rc_context(STYLE):
        for path in draw(args.measured, args.out):
            print(path)


if __name__ == "__main__":
    main()
