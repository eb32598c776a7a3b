"""Published alert thresholds on what is learnt from, raw and before any correction (verl's rollout-correction guide)."""

from collections.abc import Mapping

BOUNDS: dict[str, tuple[float, float, str]] = {
    "ratio/mean": (0.5, 2.0, "the mean importance weight should be near 1"),
    "mismatch/ess": (0.3, float("inf"), "few tokens carry the batch"),
    "mismatch/ess_response": (0.3, float("inf"), "few responses carry the batch"),
    "mismatch/weight_std": (0.0, 1.0, "importance weights spread widely"),
    "mismatch/k1": (-0.1, 0.1, "the law that sampled is far from the one that learns"),
    "mismatch/chi2": (-1.0, 1.0, "importance weights have heavy tails"),
}
"""Metric of a training step -> (lowest, highest, what it means)."""


def crossed(row: Mapping[str, float]) -> dict[str, str]:
    """One line for each bound that a step's metrics break, by metric."""
    found = {}
    for name, (low, high, meaning) in BOUNDS.items():
        value = row.get(name)
        if value is not None and not low <= value <= high:
            limit = f"below {low:g}" if value < low else f"above {high:g}"
            found[name] = f"{name} is {value:.3g}, {limit}: {meaning}"
    return found
