"""The report's figures of runs that learn from earlier policies' data: how old it was, what waited, and for whom."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from adrl_jax.report_figures import BLUE, MUTED, ORANGE, figure, series, step_axis
from adrl_jax.run_files import RunFiles


def _apart(run: RunFiles) -> bool:
    """Whether generation and learning were ever apart: something was stale, or one side had to wait for the other."""
    return any(row.get("staleness/max") or "time/learner_wait" in row for row in run.phase("train"))


def ages(run: RunFiles) -> str:
    """`staleness/mean` and `staleness/max` of each batch."""
    steps, mean = series(run.phase("train"), "staleness/mean")
    at, most = series(run.phase("train"), "staleness/max")
    if not _apart(run) or not len(steps):
        return ""

    def draw(ax: Axes) -> None:
        ax.step(at, most, where="mid", color=ORANGE, linewidth=1.2, label="oldest token")
        ax.plot(steps, mean, color=BLUE, label="mean")
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        ax.set_ylabel("policy updates")
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=2)
        step_axis(ax)

    return figure("Age of the data", "Updates between drawing a token and learning from it.", draw)


def histogram(run: RunFiles) -> str:
    """`staleness/hist` over all batches, each weighted by its tokens."""
    rows = [row for row in run.phase("train") if row.get("staleness/hist")]
    if not _apart(run) or not rows:
        return ""
    shares = np.zeros(max(len(row["staleness/hist"]) for row in rows))
    for row in rows:
        shares[: len(row["staleness/hist"])] += np.array(row["staleness/hist"]) * (row.get("rollout/tokens") or 1.0)
    shares /= shares.sum()

    def draw(ax: Axes) -> None:
        ax.bar(range(len(shares)), shares, 0.8, color=BLUE, alpha=0.85, linewidth=0)
        ax.set_xlabel("policy updates old")
        ax.set_ylabel("share of tokens")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))

    return figure("Tokens by age", "All tokens that were learnt from.", draw)


def disagreement(run: RunFiles) -> str:
    """`staleness/disagreement` of each batch."""
    steps, values = series(run.phase("train"), "staleness/disagreement")
    if not _apart(run) or not len(steps):
        return ""

    def draw(ax: Axes) -> None:
        ax.plot(steps, 100 * values, color=BLUE)
        ax.set_ylim(bottom=0)
        ax.set_ylabel("% of tokens")
        step_axis(ax)

    caption = "Stored tokens that the policy would not draw any more, with the same noise."
    return figure("Disagreement", caption, draw)


def queue(run: RunFiles) -> str:
    """`queue/depth` right after each batch was taken."""
    steps, depth = series(run.phase("train"), "queue/depth")
    if not _apart(run) or not len(steps):
        return ""

    def draw(ax: Axes) -> None:
        ax.step(steps, depth, where="mid", color=BLUE)
        ax.fill_between(steps, depth, step="mid", color=BLUE, alpha=0.12)
        ax.set_ylim(bottom=0)
        ax.set_ylabel("batches")
        step_axis(ax)

    return figure("Queue", "Finished batches that wait for the learner, after each was taken.", draw)


def waits(run: RunFiles) -> str:
    """`time/learner_wait` and `time/generator_wait` of each step; of runs with a thread for each side."""
    at, generator = series(run.phase("train"), "time/generator_wait")
    steps, learner = series(run.phase("train"), "time/learner_wait")
    if not len(at) and not len(steps):
        return ""

    def draw(ax: Axes) -> None:
        ax.bar(steps - 0.2, learner, 0.38, color=ORANGE, label="learner waits for a batch", linewidth=0)
        ax.bar(at + 0.2, generator, 0.38, color=MUTED, alpha=0.6, label="generator waits for leave", linewidth=0)
        top = float(max(learner.max(initial=0), generator.max(initial=0), 1e-3))
        ax.set_ylim(0, 1.35 * top)  # room for the legend
        ax.set_ylabel("seconds")
        ax.legend(loc="upper right", ncols=2)
        step_axis(ax)

    total = f"In all the learner waited {learner.sum():.1f} s, the generator {generator.sum():.1f} s."
    return figure("Who waited", total, draw)


ALL = (ages, histogram, disagreement, queue, waits)
