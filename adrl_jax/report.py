"""One self-contained HTML page of a run, drawn from the files in its folder alone.

`write(workdir)` reads metrics.jsonl, arms.jsonl, samples.jsonl and summary.json and writes report.html: no script, no
network, figures inline as SVG. `python -m adrl_jax.report WORKDIR` draws it again.
"""

import html
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adrl_jax import report_figures, report_staleness
from adrl_jax.run_files import RunFiles, read

_CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f6f9; color: #1c2330; font: 15px/1.5 Inter, "Helvetica Neue", Helvetica, Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 15px; margin: 0 0 2px; }
h2.section { font-size: 19px; margin: 28px 0 12px; }
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
    figures, stale = ([figure(run) for figure in some] for some in (report_figures.ALL, report_staleness.ALL))
    body = [
        f"<h1>{html.escape(run.name)}</h1>",
        f"<p>{html.escape(_subtitle(run))}</p>",
        f'<div class="cards">{"".join(_cards(run.summary))}</div>',
        f'<div class="grid">{"".join(figures)}</div>',
        f'<h2 class="section">Staleness</h2><div class="grid">{"".join(stale)}</div>' if any(stale) else "",
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


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m adrl_jax.report WORKDIR")
    print(write(Path(sys.argv[1])))
