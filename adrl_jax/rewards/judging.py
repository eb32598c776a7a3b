"""Numbers that say how good a policy is, each with an interval: win-rates, pass@k, perplexity, KL. All on the host, float64.

Intervals are percentile bootstraps over prompts, since responses to one prompt are not independent.
"""

from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """Attributes: value; low, high, the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


def bootstrap(values: np.ndarray, *, resamples: int = 2000, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Mean of `values` `[prompts]` with its interval.

    Raises:
        ValueError: there are none.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"bootstrap needs a vector of at least one value, got shape {values.shape}")
    draws = np.random.default_rng(seed).integers(0, values.size, (resamples, values.size))
    tail = (1 - confidence) / 2
    low, high = np.quantile(values[draws].mean(axis=1), [tail, 1 - tail])
    return Estimate(float(values.mean()), float(low), float(high))


def win_rate(ours: np.ndarray, theirs: np.ndarray) -> Estimate:
    """Share of prompts on which our response has the higher gold reward, a tie counting half.

    Args:
        ours, theirs: `[prompts]` or `[prompts, samples]`; with samples all pairs of a prompt are compared.
    """
    a, b = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (ours, theirs))
    if len(a) != len(b):
        raise ValueError(f"ours has {len(a)} prompts, theirs {len(b)}")
    wins = (a[:, :, None] > b[:, None, :]) + 0.5 * (a[:, :, None] == b[:, None, :])
    return bootstrap(wins.mean(axis=(1, 2)))


def pass_at_k(correct: np.ndarray, k: int) -> Estimate:
    """The chance that at least one of `k` responses is right: 1 - C(n - c, k) / C(n, k) of n samples with c right, mean over
    prompts (arXiv 2107.03374, eq. 1).

    Args:
        correct: bool `[prompts, n]`.

    Raises:
        ValueError: k is not in [1, n].
    """
    correct = np.asarray(correct, bool)
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k={k!r} must be between 1 and the {n} samples of a prompt")
    wrong = n - correct.sum(axis=1)
    # C(n - c, k) / C(n, k) as a product, which neither overflows nor needs c < n - k.
    missed = np.prod([np.clip(wrong - i, 0, None) / (n - i) for i in range(k)], axis=0)
    return bootstrap(1 - missed)


def divergence(policy: list[np.ndarray], reference: list[np.ndarray]) -> Estimate:
    """KL(policy || reference) a response, nats: the mean over responses of sum log pi - log ref of what the policy drew."""
    return bootstrap(np.array([np.sum(p - r, dtype=np.float64) for p, r in zip(policy, reference, strict=True)]))


def perplexity(log_probs: list[np.ndarray]) -> float:
    """exp of the mean of -log p over all tokens."""
    return float(np.exp(-np.concatenate(log_probs).astype(np.float64).mean()))


def slope(x: np.ndarray, y: np.ndarray, *, resamples: int = 2000, seed: int = 0) -> Estimate:
    """Least-squares slope of y over x with a bootstrap interval over the points.

    Raises:
        ValueError: fewer than two distinct x.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.shape != y.shape or np.unique(x).size < 2:
        raise ValueError(f"a slope needs two vectors of one length with at least two distinct x, got {x.shape} and {y.shape}")

    def fit(a, b):
        return np.sum((a - a.mean()) * (b - b.mean())) / np.sum((a - a.mean()) ** 2)

    rng, found = np.random.default_rng(seed), []
    while len(found) < resamples:
        at = rng.integers(0, x.size, x.size)
        if np.unique(x[at]).size > 1:
            found.append(fit(x[at], y[at]))
    low, high = np.quantile(found, [0.025, 0.975])
    return Estimate(float(fit(x, y)), float(low), float(high))
