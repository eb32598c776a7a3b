"""The bandit that does not learn: one arm for ever. Runs with it depend on no clock."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.bandit.base import Bandit, checked


class FixedState(NamedTuple):
    """Attributes:
    reports: int32 `[]`, launches reported so far.
    """

    reports: jax.Array


def fixed(arm: int, num_arms: int | None = None) -> Bandit:
    """Always picks `arm`.

    Args:
        arm: index into the run's strategies.
        num_arms: how many strategies there are; `arm + 1` where not given.

    Raises:
        ValueError: `arm` is not in `[0, num_arms)`.
    """
    any_arms = num_arms is None
    num_arms = arm + 1 if any_arms else num_arms
    if not 0 <= arm < num_arms:
        raise ValueError(f"arm={arm!r} must be in [0, {num_arms})")

    def init():
        return FixedState(jnp.zeros((), jnp.int32))

    def select(state, key, context):
        del state, key, context
        return jnp.int32(arm)

    def update(state, report):
        del report
        return FixedState(state.reports + 1)

    return checked(Bandit(init, select, update), num_arms, any_arms=any_arms)
