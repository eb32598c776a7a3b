"""One self-contained HTML page of a run, drawn from the files in its folder alone.

`write(workdir)` reads metrics.jsonl, arms.jsonl, samples.jsonl and summary.json and writes report.html: no script, no
network, figures inline as SVG. `python -m adrl_jax.report WORKDIR` draws it again.
"""

import dataclasses
import html
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adrl_jax.metrics import read_lines

_INK, _MUTED, _GRID = "#1c2330", "#6b7483", "#e7eaf0"
_BLUE, _ORANGE = "#2f6fed", "#e8833a"
_ARMS = ("#c3cad6", "#2f6fed", "#e8833a", "#2aa198", "#b5539c", "#8a6fd1", "#6aa84f", "#d6a419", "#c0504d")
_PHASES = ("rollout", "learner_wait", "refresh", "reward", "pack", "measure", "update", "sync", "compile")

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "axes.edgecolor": "#c9cfd9",
    "axes.labelcolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "text.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "adrl",
}

_CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f6f9; color: #1c2330; font: 15px/1.5 Inter, "Helvetica Neue", Helvetica, Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 15px; margin: 0 0 2px; }
p { margin: 0; color: #6b7483; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin: 28px 0 20px; }
.card, figure, .panel { background: #fff; border: 1px solid #e3e7ee; border-radius: 10px; }
.card { padding: 14px 16px; }
.card span { display: block; font-size: 12.5px; color: #6b7483; }
.card b { display: block; font-size: 23px; font-weight: 600; letter-spacing: -.01em; margin-top: 2px; }
.card small { color: #6b7483; font-size: 12.5px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 16px; }
figure { margin: 0; padding: 16px 18px 10px; }
figure p { font-size: 13px; margin-bottom: 6px; }
figure svg { width: 100%; height: auto; display: block; }
.panel { margin-top: 16px; padding: 16px 18px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; color: #6b7483; font-weight: 500; }
th, td { padding: 7px 10px 7px 0; border-bottom: 1px solid #eef0f4; vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font: 12.5px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap; word-break: break-word; }
@media (max-width: 520px) { .grid { grid-template-columns: 1fr; } }
"""


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What a run's folder holds; lists are empty and the summary is `{}` where a file is absent."""

    name: str
    metrics: list[dict[str, Any]]
    arms: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    summary: dict[str, Any]

    def phase(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.metrics if row["phase"] == name]


def read(workdir: Path) -> RunFiles:
    summary = workdir / "summary.json"
    return RunFiles(
        workdir.resolve().name,
        read_lines(workdir / "metrics.jsonl"),
        read_lines(workdir / "arms.jsonl"),
        read_lines(workdir / "samples.jsonl"),
        json.loads(summary.read_text()) if summary.exists() else {},
    )


def write(workdir: Path) -> Path:
    """Draws `workdir/report.html`; figures whose data the run does not have are left out.

    Raises:
        FileNotFoundError: there is no metrics.jsonl.
    """
    if not (workdir / "metrics.jsonl").exists():
        raise FileNotFoundError(f"{workdir} has no metrics.jsonl; a report is drawn from a run's folder")
    path = workdir / "report.html"
    path.write_text(page(read(workdir)), encoding="utf-8")
    return path


def page(run: RunFiles) -> str:
    """The whole page."""
    figures = [figure(run) for figure in (_reward, _lengths, _running, _accept, _arm_shares, _times)]
    body = [
        f"<h1>{html.escape(run.name)}</h1>",
        f"<p>{html.escape(_subtitle(run))}</p>",
        f'<div class="cards">{"".join(_cards(run.summary))}</div>',
        f'<div class="grid">{"".join(f for f in figures if f)}</div>',
        _closing_table(run.summary),
        _sample_table(run.samples),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(run.name)} · training report</title><style>{_CSS}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _subtitle(run: RunFiles) -> str:
    steps = len(run.phase("train"))
    tokens = sum(row.get("rollout/tokens") or 0 for row in run.phase("train"))
    warm = len(run.phase("warm_start"))
    text = f"{steps} steps of reinforcement learning on {tokens:,.0f} sampled tokens"
    return text + (f", after {warm} supervised updates" if warm else "")


# The closing figures.


def closing_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The closing table: label and value, for the terminal and the page alike."""
    speed, speed_off = summary.get("rollout_tokens_per_s"), summary.get("rollout_tokens_per_s_off")
    ties = summary.get("tie_divergences")
    identical = {
        True: f"yes, but for {ties} float ties" if ties else "yes, every token",
        False: f"no, {summary.get('divergent_responses')} responses differ",
    }
    rows = [
        ("reward before", _number(summary.get("reward_start"), 3)),
        ("reward after", _number(summary.get("reward_end"), 3)),
        ("rollout speed-up by speculation", _number(summary.get("rollout_speedup"), 2, "×")),
        ("tokens/s with, without", f"{speed:,.0f}, {speed_off:,.0f}" if speed and speed_off else "–"),
        ("accept length", _number(summary.get("accept_length"), 2)),
        ("same tokens with and without", identical.get(summary.get("identical_tokens"), "–")),
        ("time", f"{summary['seconds'] / 60:.1f} min" if summary.get("seconds") is not None else "–"),
    ]
    return rows


def closing_text(summary: dict[str, Any]) -> str:
    """The closing table for a terminal."""
    rows = closing_rows(summary)
    width = max(len(label) for label, _ in rows)
    line = "─" * (width + 24)
    return "\n".join([line, *(f" {label:<{width}}   {value}" for label, value in rows), line])


def _number(value: Any, digits: int, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def _cards(summary: dict[str, Any]) -> list[str]:
    if not summary:
        return []
    start, end = summary.get("reward_start"), summary.get("reward_end")
    lift = f"from {start:.3f}" if start is not None else ""
    identical = {True: ("identical", "token for token"), False: ("differs", "see below")}
    same, how = identical.get(summary.get("identical_tokens"), ("–", ""))
    speed = summary.get("rollout_tokens_per_s")
    cards = [
        ("reward", _number(end, 3), lift),
        ("rollout speed-up", _number(summary.get("rollout_speedup"), 2, "×"), f"{speed:,.0f} tokens/s" if speed else ""),
        ("accept length", _number(summary.get("accept_length"), 2), "tokens a verify pass"),
        ("same tokens without", same, how),
        ("time", f"{summary['seconds'] / 60:.1f} min", f"{summary['steps']} steps"),
    ]
    return [
        f'<div class="card"><span>{a}</span><b>{html.escape(b)}</b><small>{html.escape(c)}</small></div>' for a, b, c in cards
    ]


def _closing_table(summary: dict[str, Any]) -> str:
    if not summary:
        return ""
    rows = "".join(f'<tr><td>{html.escape(a)}</td><td class="n">{html.escape(b)}</td></tr>' for a, b in closing_rows(summary))
    return f'<div class="panel"><h2>Closing table</h2><table>{rows}</table></div>'


def _sample_table(samples: Sequence[dict[str, Any]], count: int = 8) -> str:
    last = [s for s in samples if s["phase"] == "train"][-count:]
    if not last:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("prompt", "response", "answer", "reward", "advantage", "tokens"))
    rows = []
    for s in last:
        texts = "".join(
            f"<td><code>{html.escape(_short(str(s[k] or '–')))}</code></td>" for k in ("prompt", "response", "extracted")
        )
        reward = "no number" if s["reward"] is None else f"{s['reward']:.2f}"
        numbers = (
            f'<td class="n">{reward}</td><td class="n">{s["advantage"]:+.2f}</td><td class="n">{s["response_length"]}</td>'
        )
        rows.append(f"<tr>{texts}{numbers}</tr>")
    return (
        f'<div class="panel"><h2>Responses of step {last[-1]["step"]}</h2><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    )


def _short(text: str, limit: int = 320) -> str:
    return text if len(text) <= limit else text[: limit // 2] + " … " + text[-limit // 2 :]


# The figures. Each returns HTML, or "" where the run has no data for it.


def _figure(title: str, caption: str, draw: Callable[[Axes], None]) -> str:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 3.0), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return f"<figure><h2>{html.escape(title)}</h2><p>{html.escape(caption)}</p>{svg}</figure>"


def _series(rows: Sequence[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs], float)


def _step_axis(ax: Axes) -> None:
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _reward(run: RunFiles) -> str:
    steps, values = _series(run.phase("train"), "reward/mean")
    at, held_out = _series(run.phase("evaluate"), "reward/mean")
    if not len(steps):
        return ""

    def draw(ax: Axes) -> None:
        ax.plot(steps, values, color=_BLUE, alpha=0.3, linewidth=1.2, label="rollout batch")
        ax.plot(steps, _smooth(values), color=_BLUE, label="smoothed")
        if len(at):
            ax.plot(at, held_out, "o--", color=_ORANGE, linewidth=1.2, markersize=5, label="held-out prompts")
        ax.legend(loc="lower right")
        _step_axis(ax)

    return _figure("Reward", "Mean over a step's responses, and on prompts never trained on.", draw)


def _smooth(values: np.ndarray, window: int = 5) -> np.ndarray:
    """Centred moving average whose window shrinks at both ends."""
    half = window // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _lengths(run: RunFiles) -> str:
    lengths = np.array([n for row in run.arms for n in row.get("lengths", ())])
    if not len(lengths):
        return ""
    median, longest = np.median(lengths), lengths.max()

    def draw(ax: Axes) -> None:
        ax.hist(lengths, bins=min(40, max(5, int(longest))), color=_BLUE, alpha=0.85)
        ax.axvline(median, color=_ORANGE, linewidth=1.4)
        ax.annotate(
            f"median {median:.0f}",
            (median, 0.93),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            color=_ORANGE,
            fontsize=9,
        )
        ax.set_yscale("log")
        ax.set_xlabel("tokens of a response")
        ax.set_ylabel("responses")

    caption = f"All training rollouts; the longest is {longest / max(median, 1):.0f} times the median."
    return _figure("Response length", caption, draw)


def _running(run: RunFiles) -> str:
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
        for points, color, label in ((off, "#aab2c0", "without speculation"), (on, _BLUE, "with speculation")):
            if points:
                t, n = zip(*points)
                ax.step(t, n, where="post", color=color, label=label)
                ax.fill_between(t, n, step="post", color=color, alpha=0.12)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("seconds since the rollout began")
        ax.set_ylabel("requests running")
        ax.legend(loc="upper right")

    return _figure("The tail of one rollout", caption, draw)


def _accept(run: RunFiles) -> str:
    steps, values = _series(run.phase("train"), "spec/accept_len")
    if not len(steps):
        return ""

    def draw(ax: Axes) -> None:
        ax.plot(steps, values, color=_BLUE)
        ax.axhline(1.0, color=_MUTED, linewidth=1, linestyle=":")
        ax.set_ylim(bottom=min(0.9, values.min()))
        _step_axis(ax)

    return _figure("Accept length", "Tokens committed a verify pass and row; 1.0 means no draft was accepted.", draw)


def _arm_shares(run: RunFiles) -> str:
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
        _step_axis(ax)

    return _figure("Arm chosen", "Share of each rollout's launches that ran each strategy.", draw)


def _times(run: RunFiles) -> str:
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
        _step_axis(ax)

    return _figure("Time of a step", "By phase; compilation apart.", draw)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m adrl_jax.report WORKDIR")
    print(write(Path(sys.argv[1])))
