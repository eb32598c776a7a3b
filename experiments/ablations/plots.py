"""How the pictures of studies look: a mean with its interval over seeds, seeds as dots, legends outside of the data."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from experiments.figures import STYLE

COLORS = ("#2f6fed", "#e8833a", "#2aa198", "#b5539c", "#8a6fd1", "#6aa84f")


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean of independent runs and the bounds of its t interval; both are the mean where there is but one run."""
    x = np.asarray(values, np.float64)
    mean = float(x.mean())
    if x.size < 2:
        return mean, mean, mean
    half = float(stats.t.ppf(0.5 + confidence / 2, x.size - 1) * x.std(ddof=1) / np.sqrt(x.size))
    return mean, mean - half, mean + half


def band(ax: Axes, places: Sequence[float], groups: Sequence[Sequence[float]], color: str, label: str, width: float = 1.8):
    """A line through the means of `groups` (values of all seeds at each place), its 95 % band, and a dot for each value."""
    found = [(x, *interval(values), values) for x, values in zip(places, groups, strict=True) if len(values)]
    if not found:
        return
    x, mean, low, high, values = zip(*found)
    ax.plot(x, mean, color=color, label=label, linewidth=width, marker="o", markersize=3.5)
    ax.fill_between(x, low, high, color=color, alpha=0.14, linewidth=0)
    for place, each in zip(x, values):
        ax.plot([place] * len(each), each, ".", color=color, alpha=0.45, markersize=4)


def legend(figure: Figure, ax: Axes, columns: int = 6) -> None:
    """One legend above all panels."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(columns, len(labels)), frameon=False)


def save(figure: Figure, path: str | pathlib.Path) -> pathlib.Path:
    """Writes the picture, the same bytes for the same numbers."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white", metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)
    return path


def style() -> Any:
    """A context in which figures have our look."""
    return matplotlib.rc_context(STYLE)
