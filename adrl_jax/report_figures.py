"""The figures of a run's report, each an inline SVG in HTML, or "" where the run has no data for it."""

import html
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adrl_jax.run_files import RunFiles

INK, MUTED, GRID = "#1c2330", "#6b7483", "#e7eaf0"
BLUE, ORANGE = "#2f6fed", "#e8833a"
_ARMS = ("#c3cad6", "#2f6fed", "#e8833a", "#2aa198", "#b5539c", "#8a6fd1", "#6aa84f", "#d6a419", "#c0504d")
_PHASES = ("rollout", "learner_wait", "refresh", "reward", "pack", "measure", "update", "sync", "compile")

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "axes.edgecolor": "#c9cfd9",
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "adrl",
}


def figure(title: str, caption: str, draw: Callable[[Axes], None]) -> str:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 3.0), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return f"<figure><h2>{html.escape(title)}</h2><p>{html.escape(caption)}</p>{svg}</figure>"


def series(rows: Sequence[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs], float)


def step_axis(ax: Axes) -> None:
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def reward(run: RunFiles) -> str:
    steps, values = series(run.phase("train"), "reward/mean")
    at, held_out = series(run.phase("evaluate"), "reward/mean")
    if not len(steps):
        return ""

    def draw(ax: Axes) -> None:
        ax.plot(steps, values, color=BLUE, alpha=0.3, linewidth=1.2, label="rollout batch")
        ax.plot(steps, smooth(values), color=BLUE, label="smoothed")
        if len(at):
            ax.plot(at, held_out, "o--", color=ORANGE, linewidth=1.2, markersize=5, label="held-out prompts")
        ax.legend(loc="lower right")
        step_axis(ax)

    return figure("Reward", "Mean over a step's responses, and on prompts never trained on.", draw)


def smooth(values: np.ndarray, window: int = 5) -> np.ndarray:
    """Centred moving average whose window shrinks at both ends."""
    half = window // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def lengths(run: RunFiles) -> str:
    lengths = np.array([n for row in run.arms for n in row.get("lengths", ())])
    if not len(lengths):
        return ""
    median, longest = np.median(lengths), lengths.max()

    def draw(ax: Axes) -> None:
        ax.hist(lengths, bins=min(40, max(5, int(longest))), color=BLUE, alpha=0.85)
        ax.axvline(median, color=ORANGE, linewidth=1.4)
        ax.annotate(
            f"median {median:.0f}",
            (median, 0.93),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            color=ORANGE,
            fontsize=9,
        )
        ax.set_yscale("log")
        ax.set_xlabel("tokens of a response")
        ax.set_ylabel("responses")

    caption = f"All training rollouts; the longest is {longest / max(median, 1):.0f} times the median."
    return figure("Response length", caption, draw)


def running(run: RunFiles) -> str:
    on, off = run.summary.get("running"), run.summary.get("running_off")
    caption = "The closing comparison: the same responses, generated with and without speculation."
    if not on and run.arms:
        last = run.arms[-1]
        on = [[t - last["start"][0], n] for t, n in zip(last["start"], last["running"])]
        on.append([last["start"][-1] + last["seconds"][-1] - last["start"][0], 0])
        caption = f"The rollout of step {last['step']}."
    if not on:
        return ""

    def draw(ax: Axes) -> None:
        for points, color, label in ((off, "#aab2c0", "without speculation"), (on, BLUE, "with speculation")):
            if points:
                t, n = zip(*points)
                ax.step(t, n, where="post", color=color, label=label)
                ax.fill_between(t, n, step="post", color=color, alpha=0.12)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("seconds since the rollout began")
        ax.set_ylabel("requests running")
        ax.legend(loc="upper right")

    return figure("The tail of one rollout", caption, draw)


def accept(run: RunFiles) -> str:
    steps, values = series(run.phase("train"), "spec/accept_len")
    if not len(steps):
        return ""

    def draw(ax: Axes) -> None:
        ax.plot(steps, values, color=BLUE)
        ax.axhline(1.0, color=MUTED, linewidth=1, linestyle=":")
        ax.set_ylim(bottom=min(0.9, values.min()))
        step_axis(ax)

    return figure("Accept length", "Tokens committed a verify pass and row; 1.0 means no draft was accepted.", draw)


def arm_shares(run: RunFiles) -> str:
    names = list(dict.fromkeys(arm for row in run.arms for arm in row["arms"]))
    if not names:
        return ""
    names.sort(key=lambda n: (n != "off", n))
    shares = np.array([[row["arms"].count(n) for n in names] for row in run.arms], float)
    shares /= shares.sum(axis=1, keepdims=True)
    steps = [row["step"] for row in run.arms]

    def draw(ax: Axes) -> None:
        bottom = np.zeros(len(steps))
        for i, name in enumerate(names):
            ax.bar(steps, shares[:, i], 0.92, bottom, color=_ARMS[i % len(_ARMS)], label=name, linewidth=0)
            bottom += shares[:, i]
        ax.set_ylim(0, 1)
        ax.grid(False)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=min(len(names), 5), handlelength=1, columnspacing=1.2)
        step_axis(ax)

    return figure("Arm chosen", "Share of each rollout's launches that ran each strategy.", draw)


def times(run: RunFiles) -> str:
    rows = run.phase("train")
    if not rows:
        return ""
    steps = [row["step"] for row in rows]

    def draw(ax: Axes) -> None:
        bottom = np.zeros(len(steps))
        for i, phase in enumerate(_PHASES):
            values = np.array([row.get(f"time/{phase}") or 0.0 for row in rows])
            if values.max() < 0.01 * max(sum(row.get("time/step") or 0 for row in rows) / len(rows), 1e-9):
                continue
            color = "#d9dee7" if phase == "compile" else _ARMS[1 + i]
            ax.bar(steps, values, 0.92, bottom, color=color, label=phase, linewidth=0)
            bottom += values
        ax.legend(loc="upper right", ncols=2)
        ax.set_ylabel("seconds")
        step_axis(ax)

    return figure("Time of a step", "By phase; compilation apart.", draw)


ALL = (reward, lengths, running, accept, arm_shares, times)
