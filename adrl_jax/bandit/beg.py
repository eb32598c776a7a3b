"""BEG-MAB: bucketed epsilon-greedy choice of the speculative strategy (TLT, arXiv 2511.16665).

Strategies that verify many tokens pay off only while few requests run. So the speculative strategies are grouped by the
tokens they verify, most first, and group i serves the batch sizes from `thresholds[i]` up to the next threshold. Within a
bucket the choice is epsilon-greedy over the median of the last `window` throughputs.

Two deliberate differences from the published rule: "no speculation" is a candidate in every bucket, since at full batch
every strategy may lose; and untried candidates come before any repeat, chance exploration included.

Letters: `K` buckets, `A` arms, `W` window.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.bandit.base import Arm, Bandit, checked, off_arm, report_depth, tokens_to_verify


class BegState(NamedTuple):
    """One ring of throughputs for each (bucket, arm).

    Attributes:
        rewards: float32 `[K, A, W]`, tokens per second; slot `count % W` is written next.
        stamps: int32 `[K, A, W]`, the bucket's clock when the entry was written.
        count: int32 `[K, A]`, entries ever written.
        clock: int32 `[K]`, reports ever received in the bucket.
    """

    rewards: jax.Array
    stamps: jax.Array
    count: jax.Array
    clock: jax.Array


def bucket_table(strategies: Sequence[Arm], thresholds: Sequence[int]) -> np.ndarray:
    """Which arms may run in which bucket: bool `[K, A]`.

    Raises:
        ValueError: no arm or more than one arm without speculation; `thresholds` does not start at 1, does not increase, or
            is not as long as the number of distinct `verify_tokens` (one bucket if nothing speculates).
    """
    off = off_arm(strategies)
    thresholds = list(thresholds)
    if not thresholds or thresholds[0] != 1 or any(a >= b for a, b in itertools.pairwise(thresholds)):
        raise ValueError(f"thresholds={thresholds!r} must start at 1 and increase, so that every batch size has its bucket")
    groups = sorted({tokens_to_verify(s) for s in strategies if s.depth > 0}, reverse=True)
    if len(thresholds) != max(len(groups), 1):
        raise ValueError(
            f"thresholds={thresholds!r} must have one entry for each distinct number of tokens to verify, "
            f"of which the strategies have {len(groups)}: {groups}"
        )
    table = np.zeros((len(thresholds), len(strategies)), bool)
    table[:, off] = True
    for arm, strategy in enumerate(strategies):
        if strategy.depth > 0:
            table[groups.index(tokens_to_verify(strategy)), arm] = True
    return table


def beg(
    strategies: Sequence[Arm],
    thresholds: Sequence[int],
    epsilon: float = 0.1,
    window: int = 300,
    max_age: int | None = None,
) -> Bandit:
    """Builds the bandit.

    Args:
        strategies: the run's arms, the one without speculation among them.
        thresholds: first batch size of each bucket, starting at 1.
        epsilon: chance of a uniformly random candidate instead of the best one.
        window: throughputs kept for each (bucket, arm).
        max_age: entries older than this many reports of their bucket are ignored, so that an arm seldom run does not live on old
            evidence, and one whose entries are all too old counts as untried. None keeps them, as published.

    Raises:
        ValueError: a value out of range, or thresholds that do not fit the strategies (`bucket_table`).
    """
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon={epsilon!r} must be in [0, 1]")
    if window < 1:
        raise ValueError(f"window={window!r} must be at least 1")
    if max_age is not None and max_age < 1:
        raise ValueError(f"max_age={max_age!r} must be at least 1, or None to keep every entry of the window")
    table = bucket_table(strategies, thresholds)
    buckets, arms = table.shape

    def init():
        return BegState(
            jnp.zeros((buckets, arms, window), jnp.float32),
            jnp.zeros((buckets, arms, window), jnp.int32),
            jnp.zeros((buckets, arms), jnp.int32),
            jnp.zeros((buckets,), jnp.int32),
        )

    def select(state, key, context):
        k = bucket_of(context.running, thresholds)
        candidates = jnp.asarray(table)[k]
        values = _medians(state, k, max_age)
        untried = candidates & jnp.isnan(values)
        best = jnp.argmax(jnp.where(candidates & ~untried, values, -jnp.inf))
        coin_key, arm_key = jax.random.split(key)
        uniform = jax.random.categorical(arm_key, jnp.where(candidates, 0.0, -jnp.inf))
        explore = jax.random.uniform(coin_key) < epsilon
        chosen = jnp.where(explore, uniform, best)
        return jnp.where(untried.any(), jnp.argmax(untried), chosen).astype(jnp.int32)

    def update(state, report):
        k, arm = bucket_of(report.running, thresholds), report.arm
        slot = state.count[k, arm] % window
        return BegState(
            state.rewards.at[k, arm, slot].set(report.tokens / report.seconds),
            state.stamps.at[k, arm, slot].set(state.clock[k]),
            state.count.at[k, arm].add(1),
            state.clock.at[k].add(1),
        )

    return checked(Bandit(init, select, update), arms, report_depth(strategies))


class BegStaticState(NamedTuple):
    """Attributes:
    calm: int32 `[]`, verify passes in a row with at most `off_above` requests running.
    """

    calm: jax.Array


def beg_static(strategies: Sequence[Arm], thresholds: Sequence[int], off_above: int | None = 32, patience: int = 10) -> Bandit:
    """The rule as TLT's published code ships it: one strategy a bucket, so that nothing is explored or learnt.

    Bucket `i` always runs the first listed strategy of the `i`-th largest group, and no speculation while more than `off_above`
    requests run or ran within the last `patience` verify passes.

    Args:
        strategies, thresholds: as for `beg`.
        off_above: most requests that are speculated for; None has no limit and no patience.
        patience: verify passes with few enough requests before speculation starts.

    Raises:
        ValueError: a value out of range, or thresholds that do not fit the strategies (`bucket_table`).
    """
    if off_above is not None and off_above < 0:
        raise ValueError(f"off_above={off_above!r} must be at least 0, or None for no limit")
    if patience < 0:
        raise ValueError(f"patience={patience!r} must be at least 0")
    table, off = bucket_table(strategies, thresholds), off_arm(strategies)
    speculative = np.where(np.arange(len(strategies)) == off, False, table)
    chosen = np.where(speculative.any(1), speculative.argmax(1), off)

    def init():
        return BegStaticState(jnp.int32(0))

    def select(state, key, context):
        del key
        arm = jnp.asarray(chosen, jnp.int32)[bucket_of(context.running, thresholds)]
        if off_above is None:
            return arm
        return jnp.where((context.running > off_above) | (state.calm < patience), off, arm).astype(jnp.int32)

    def update(state, report):
        few = True if off_above is None else report.running <= off_above
        return BegStaticState(jnp.where(few, jnp.minimum(state.calm + report.rounds, patience), 0).astype(jnp.int32))

    return checked(Bandit(init, select, update), len(strategies), report_depth(strategies))


def bucket_of(running: jax.Array | int, thresholds: Sequence[int]) -> jax.Array:
    """Index of the last threshold that `running` reaches, int32."""
    return jnp.searchsorted(jnp.asarray(thresholds, jnp.int32), running, side="right").astype(jnp.int32) - 1


def medians(state: BegState, max_age: int | None = None) -> jax.Array:
    """Median throughput of each (bucket, arm) in tokens/s, float32 `[K, A]`; NaN where there is no entry."""
    return jax.vmap(lambda k: _medians(state, k, max_age))(jnp.arange(state.clock.shape[0]))


def _medians(state: BegState, bucket: jax.Array, max_age: int | None) -> jax.Array:
    window = state.rewards.shape[-1]
    valid = jnp.arange(window) < state.count[bucket][:, None]
    if max_age is not None:
        valid &= state.clock[bucket] - state.stamps[bucket] <= max_age
    n = valid.sum(-1)
    ordered = jnp.sort(jnp.where(valid, state.rewards[bucket], jnp.inf), axis=-1)

    def at(index):
        return jnp.take_along_axis(ordered, jnp.clip(index, 0)[:, None], axis=-1)[:, 0]

    return jnp.where(n > 0, (at((n - 1) // 2) + at(n // 2)) / 2, jnp.nan)
