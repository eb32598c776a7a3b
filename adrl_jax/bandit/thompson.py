"""Thompson sampling on tokens per second and request, with Gaussian beliefs that fade.

In each batch bucket an arm's rewards are taken as normal with unknown mean and variance. Counts, sums and sums of squares are
discounted with every report of the bucket, so an arm that is not run becomes uncertain again (Raj and Kalyani 2017, arXiv
1707.09727). A draw of each mean,

    mean + noise * sqrt(variance / n),

decides; an arm with no evidence left comes first.

Letters: `B` batch buckets, `A` arms.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.bandit.base import Arm, Bandit, batch_bucket, check_buckets, checked, off_arm, report_depth, reward

FLOOR = 0.03  # least relative standard deviation of a reward: two equal reports prove nothing
FORGOTTEN = 0.05  # discounted reports below which an arm counts as untried


class ThompsonState(NamedTuple):
    """Attributes:
    count, mean, square: float32 `[B, A]`: discounted number of reports, their mean reward and their mean squared reward.
    """

    count: jax.Array
    mean: jax.Array
    square: jax.Array


def thompson(strategies: Sequence[Arm], batch_buckets: Sequence[int], *, discount: float = 0.99) -> Bandit:
    """Builds the bandit. Every arm is a candidate in every bucket.

    Args:
        strategies: the run's arms, the one without speculation among them.
        batch_buckets: the compiled batch sizes, ascending.
        discount: of the evidence of a bucket, at each of its reports.

    Raises:
        ValueError: no or several arms without speculation, or a value out of range.
    """
    off_arm(strategies)
    check_buckets(batch_buckets)
    if not 0 < discount <= 1:
        raise ValueError(f"discount={discount!r} must be in (0, 1]")
    shape = len(batch_buckets), len(strategies)

    def init():
        zeros = jnp.zeros(shape, jnp.float32)
        return ThompsonState(zeros, zeros, zeros)

    def select(state, key, context):
        k = batch_bucket(batch_buckets, context.batch)
        count, mean = state.count[k], state.mean[k]
        variance = jnp.maximum(state.square[k] - mean**2, (FLOOR * mean) ** 2)
        noise = jax.random.normal(key, count.shape)
        drawn = mean + noise * jnp.sqrt(variance / jnp.maximum(count, FORGOTTEN))
        return jnp.argmax(jnp.where(count > FORGOTTEN, drawn, jnp.inf)).astype(jnp.int32)

    def update(state, report):
        k, arm = batch_bucket(batch_buckets, report.batch), report.arm
        count = state.count.at[k].multiply(discount).at[k, arm].add(1.0)
        step = 1.0 / count[k, arm]
        value = reward(report)
        return ThompsonState(
            count,
            state.mean.at[k, arm].add(step * (value - state.mean[k, arm])),
            state.square.at[k, arm].add(step * (value**2 - state.square[k, arm])),
        )

    return checked(Bandit(init, select, update), shape[1], report_depth(strategies))
