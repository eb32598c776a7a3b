"""What a call of `generate` serves, what it returns, and what an asynchronous caller adds to it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adrl_jax.models.families import ModelConfig
from adrl_jax.rollout.stats import RolloutStats
from adrl_jax.speculation.drafter import Drafter
from adrl_jax.types import Request, Rollout

CACHES = ("keep", "recompute")


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """An immutable snapshot: weights with their versions, and the drafters."""

    model: ModelConfig
    params: Any
    version: int
    drafters: Mapping[str, Drafter]
    drafter_params: Mapping[str, Any]

    @property
    def keeps_hidden(self) -> bool:
        return any(d.uses_hidden for d in self.drafters.values())


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """What `Engine.generate` returns; `rollouts` are in the order of the requests."""

    rollouts: list[Rollout]
    bandit_state: Any
    stats: RolloutStats


@dataclasses.dataclass(frozen=True)
class Flow:
    """A call that goes on while weights, requests and responses come and go.

    Attributes:
        feed: `feed(free rows, idle) -> requests`, asked whenever rows are free and nobody waits. It may block where `idle`
            (nothing runs) and returns None when nothing will ever come again. None: the call has the requests it began with.
        finished: called with `[(index, rollout), …]` as responses finish, the index counting requests in the order of
            arrival. They are not kept for the call's result.
        cache: what happens to running requests when new weights are published during the call. None: nothing, the call ends
            with the weights it began with. `keep`: from the next launch on, tokens are drawn by the new weights on top of
            the old cache. `recompute`: likewise, after the cache was computed anew by the new weights.
    """

    feed: Callable[[int, bool], Sequence[Request] | None] | None = None
    finished: Callable[[list[tuple[int, Rollout]]], None] | None = None
    cache: str | None = None

    def __post_init__(self):
        if self.cache is not None and self.cache not in CACHES:
            raise ValueError(f"Flow.cache={self.cache!r} is unknown; choose one of {', '.join(CACHES)}, or None")
