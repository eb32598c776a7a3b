"""Exp3.S (Auer, Cesa-Bianchi, Freund and Schapire 2002, section 8): weights against an adversary that may change its mind.

In each batch bucket arm `a` is drawn with chance `p = (1 - rate) * softmax(w) + rate / A`; a report adds `rate / A * reward / p`
to its arm's log-weight, and every weight then takes a share `mix` of the total, so that none falls too far behind to
return. Rewards are tokens per second and request over the largest seen lately, so they lie in [0, 1].

Letters: `B` batch buckets, `A` arms.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.bandit.base import Arm, Bandit, batch_bucket, check_buckets, checked, off_arm, report_depth, reward

FADE = 0.99  # of the largest reward, at each report: a freak does not press all others to zero for ever


class Exp3State(NamedTuple):
    """Attributes:
    log_weight: float32 `[B, A]`, the largest of a bucket is 0.
    largest: float32 `[B]`, fading maximum of the rewards.
    """

    log_weight: jax.Array
    largest: jax.Array


def exp3(strategies: Sequence[Arm], batch_buckets: Sequence[int], *, rate: float = 0.1, mix: float = 1e-3) -> Bandit:
    """Builds the bandit. Every arm is a candidate in every bucket.

    Args:
        strategies: the run's arms, the one without speculation among them.
        batch_buckets: the compiled batch sizes, ascending.
        rate: share of uniformly random picks, and step size.
        mix: share of the total weight that each arm's weight takes at each report, divided by the number of arms.

    Raises:
        ValueError: no or several arms without speculation, or a value out of range.
    """
    off_arm(strategies)
    check_buckets(batch_buckets)
    if not 0 < rate <= 1:
        raise ValueError(f"rate={rate!r} must be in (0, 1]")
    if not 0 <= mix < 1:
        raise ValueError(f"mix={mix!r} must be in [0, 1)")
    buckets, arms = len(batch_buckets), len(strategies)

    def init():
        return Exp3State(jnp.zeros((buckets, arms), jnp.float32), jnp.zeros((buckets,), jnp.float32))

    def chances(state, k):
        return (1 - rate) * jax.nn.softmax(state.log_weight[k]) + rate / arms

    def select(state, key, context):
        k = batch_bucket(batch_buckets, context.batch)
        return jax.random.categorical(key, jnp.log(chances(state, k))).astype(jnp.int32)

    def update(state, report):
        k, arm = batch_bucket(batch_buckets, report.batch), report.arm
        value = reward(report)
        largest = jnp.maximum(FADE * state.largest[k], value)
        gain = value / jnp.maximum(largest, 1e-9) / chances(state, k)[arm]
        raised = state.log_weight[k].at[arm].add(rate / arms * gain)
        mixed = jnp.logaddexp(raised, jax.nn.logsumexp(raised) + jnp.log(mix / arms))
        return Exp3State(state.log_weight.at[k].set(mixed - mixed.max()), state.largest.at[k].set(largest))

    return checked(Bandit(init, select, update), arms, report_depth(strategies))
