"""How fast a rollout could be, given what a round of each strategy takes and how often drafts stand.

The rows of a rollout are advanced as a fluid: a round of an arm commits its expected tokens to every row. Between two ends of
rows the best arm for that many rows is known from the table, so the ideal is the sum over these stretches. Real rollouts
also wait for the end of a launch, round up to whole tokens, and have to find the best arm out; both sides of a speed-up do
the first two.

Letters: `A` strategies, `D` depths.
"""

import json
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from adrl_jax.bandit.acceptance import curve_name
from adrl_jax.rollout.stats import LaunchRecord
from adrl_jax.speculation.strategy import Strategy

Latency = dict[tuple[int, int, int], float]
"""`(arm, batch bucket, cache bucket) -> seconds of a round`."""


def latencies(launches: Iterable[LaunchRecord]) -> Latency:
    """Median seconds of a round, from launches that compiled nothing; drafters' catching up is left out."""
    seen: dict[tuple[int, int, int], list[float]] = {}
    for x in launches:
        if not x.compiled:
            key = (x.arm, x.batch_bucket, x.cache_bucket)
            seen.setdefault(key, []).append((x.seconds - x.catch_up_seconds) / x.rounds)
    return {key: statistics.median(values) for key, values in seen.items()}


def acceptance(launches: Iterable[LaunchRecord], arms: Sequence[Strategy]) -> dict[str, np.ndarray]:
    """By curve (`eagle`, `eagle-v3`, `eagle-w4-v16`): the chance that a draft of each depth stands, all before it having stood.

    float64 `[D]`; depths never looked at take the value of the deepest that was. Where slots are shared, a draft without a
    slot did not stand.
    """
    totals: dict[str, np.ndarray] = {}
    deepest = max([1, *(s.depth for s in arms)])
    for x in launches:
        strategy = arms[x.arm]
        if strategy.speculates:
            counts = totals.setdefault(curve_name(strategy), np.zeros((2, deepest)))
            came = (x.accept_passes, *x.accepted[:-1]) if strategy.shares_slots else x.examined
            counts[0, : len(came)] += came
            counts[1, : len(x.accepted)] += x.accepted
    found = {}
    for name, (examined, accepted) in totals.items():
        chances = np.divide(accepted, examined, out=np.full(deepest, np.nan), where=examined > 0)
        for d in range(deepest):
            if np.isnan(chances[d]):
                chances[d] = chances[d - 1] if d else 0.0
        found[name] = chances
    return found


def expected_tokens(strategy: Strategy, chances: Mapping[str, np.ndarray]) -> float:
    """Tokens a round commits to a row: 1 + the chances that the first, first two, … drafts all stand."""
    if not strategy.speculates:
        return 1.0
    return 1.0 + float(np.cumprod(chances[curve_name(strategy)][: strategy.depth]).sum())


def seconds(
    lengths: Sequence[int],
    prompt: int,
    arms: Sequence[Strategy],
    table: Latency,
    chances: Mapping[str, np.ndarray],
    batches: Sequence[int],
    allowed: Sequence[int] | None = None,
) -> float:
    """Seconds of decoding responses of these lengths (tokens), always with the best of the `allowed` arms (all where None).

    Args:
        prompt: tokens in a row's cache before.
        batches: compiled batch sizes.

    Raises:
        ValueError: the table has no entry at a batch size that is needed.
    """
    allowed = range(len(arms)) if allowed is None else allowed
    total, done = 0.0, 0.0
    for end in sorted(set(lengths)):
        running = sum(n >= end for n in lengths)
        batch = min(b for b in batches if b >= running)
        best = 0.0
        for arm in allowed:
            t = _lookup(table, arm, batch, prompt + (done + end) / 2)
            if t is not None:
                best = max(best, expected_tokens(arms[arm], chances) / t)
        if not best:
            raise ValueError(f"no latency is known at batch={batch}; the table has {sorted(table)}")
        total += (end - done) / best
        done = end
    return total


def _lookup(table: Latency, arm: int, batch: int, cache: float) -> float | None:
    """The entry with the nearest cache capacity that holds the rows, else the nearest."""
    found = {c: t for (a, b, c), t in table.items() if (a, b) == (arm, batch)}
    if not found:
        return None
    return found[min(found, key=lambda c: (c < cache, abs(c - cache)))]


def accept_length_needed(target: float, plain: float, ideal_of, depth: int) -> float | None:
    """The accept length at which the table allows a speed-up of `target`, for drafts that all stand with the same chance.

    Args:
        plain: seconds without speculation.
        ideal_of: `chance -> seconds` with the best arms.
        depth: at which the accept length is told.

    Returns:
        None where no chance is enough.
    """
    if plain / ideal_of(1.0) < target:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if plain / ideal_of(middle) >= target else (middle, high)
    return 1.0 + sum(high**d for d in range(1, depth + 1))


def by_arm(table: Latency, arms: Sequence[Strategy]) -> dict[str, dict[str, dict[str, float]]]:
    """The latency table as `bench.bandit` reads it: arm -> batch -> cache -> seconds."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for (arm, batch, cache), t in sorted(table.items()):
        out.setdefault(arms[arm].name, {}).setdefault(str(batch), {})[str(cache)] = t
    return out


def write_table(
    path: pathlib.Path, launches: Sequence[LaunchRecord], arms: Sequence[Strategy], *, source: str, world: Mapping[str, Any]
) -> None:
    """Records launches as a table that `experiments.bench.bandit --tables` plays.

    Only batch sizes that every arm was seen at are kept.

    Args:
        source: where the numbers come from.
        world: see `experiments.bench.bandit.DEFAULTS`.

    Raises:
        ValueError: no batch size holds `world["requests"]` with every arm seen there.
    """
    seconds = by_arm(latencies(launches), arms)
    batches = [b for b in sorted({int(b) for s in seconds.values() for b in s}) if all(str(b) in s for s in seconds.values())]
    if len(seconds) < len(arms) or not batches or batches[-1] < world["requests"]:
        raise ValueError(f"every arm must be seen at a batch of {world['requests']}; batches seen by all are {batches}")
    table = {
        "name": pathlib.Path(path).stem,
        "source": source,
        "arms": [{"drafter": s.drafter, "depth": s.depth, "width": s.width, "verify_tokens": s.verify_tokens} for s in arms],
        "batch_buckets": batches,
        "seconds_per_round": {name: {b: s[b] for b in map(str, batches)} for name, s in seconds.items()},
        "acceptance": {name: np.clip(c, 0.01, 0.99).round(4).tolist() for name, c in acceptance(launches, arms).items()},
        "world": dict(world),
    }
    pathlib.Path(path).write_text(json.dumps(table, indent=2) + "\n")
