"""Sliding-window upper confidence bounds (Garivier and Moulines 2011, arXiv 0805.3415) on tokens per second and request.

In each batch bucket the last `window` reports are all there is. An arm's bound is its mean among them plus

    bonus * scale * sqrt(log(n) / n_arm),        scale the largest mean, n and n_arm the reports in the window,

so the bonus is a share of what the best arm yields, and an arm that has left the window is tried again.

Letters: `B` batch buckets, `A` arms, `W` window.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.bandit.base import Arm, Bandit, batch_bucket, check_buckets, checked, off_arm, report_depth, reward


class UcbState(NamedTuple):
    """One ring of reports for each batch bucket.

    Attributes:
        arms: int32 `[B, W]`, -1 where nothing was written yet.
        rewards: float32 `[B, W]`, tokens per second and request.
        count: int32 `[B]`, reports ever received; slot `count % W` is written next.
    """

    arms: jax.Array
    rewards: jax.Array
    count: jax.Array


def ucb(strategies: Sequence[Arm], batch_buckets: Sequence[int], *, window: int = 200, bonus: float = 0.1) -> Bandit:
    """Builds the bandit. Every arm is a candidate in every bucket.

    Args:
        strategies: the run's arms, the one without speculation among them.
        batch_buckets: the compiled batch sizes, ascending.
        window: reports kept for each batch bucket.
        bonus: weight of the confidence term; rewards scatter by a few percent, not by their size, so it is far below 1.

    Raises:
        ValueError: no or several arms without speculation, or a value out of range.
    """
    off_arm(strategies)
    check_buckets(batch_buckets)
    if window < 1:
        raise ValueError(f"window={window!r} must be at least 1")
    if not bonus >= 0:
        raise ValueError(f"bonus={bonus!r} must be at least 0")
    buckets, arms = len(batch_buckets), len(strategies)

    def init():
        return UcbState(
            jnp.full((buckets, window), -1, jnp.int32),
            jnp.zeros((buckets, window), jnp.float32),
            jnp.zeros((buckets,), jnp.int32),
        )

    def select(state, key, context):
        del key
        k = batch_bucket(batch_buckets, context.batch)
        ran = (state.arms[k][:, None] == jnp.arange(arms)).astype(jnp.float32)  # [W, A]
        times = ran.sum(0)
        means = state.rewards[k] @ ran / jnp.maximum(times, 1.0)
        width = jnp.sqrt(jnp.log(jnp.maximum(times.sum(), 1.0)) / jnp.maximum(times, 1.0))
        bound = jnp.where(times > 0, means + bonus * means.max() * width, jnp.inf)
        return jnp.argmax(bound).astype(jnp.int32)

    def update(state, report):
        k = batch_bucket(batch_buckets, report.batch)
        slot = state.count[k] % window
        return UcbState(
            state.arms.at[k, slot].set(report.arm),
            state.rewards.at[k, slot].set(reward(report)),
            state.count.at[k].add(1),
        )

    return checked(Bandit(init, select, update), arms, report_depth(strategies))
