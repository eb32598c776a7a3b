"""Batches of rollouts by number: which prompts are in them, how they are generated, and where learning gets them from.

Steps count from 1; step `s` learns from batch `s`, whose groups are numbered `(s - 1) * size …` (see `staleness`). Which
prompts are in a batch depends on the prompt cursor alone, so whatever happens to work under way, it can be begun again.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from adrl_jax.rollout.engine import Flow
from adrl_jax.rollout.serving import Serving
from adrl_jax.rollout.stats import LaunchRecord, RolloutStats
from adrl_jax.runtime import collect, cursor
from adrl_jax.runtime.cursor import CursorState
from adrl_jax.runtime.lengths import LengthHistory
from adrl_jax.runtime.parts import LoopConfig, Parts
from adrl_jax.runtime.publish import Snapshot
from adrl_jax.types import Request, Rollout


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one step learns from.

    Attributes:
        step: which one.
        requests, rollouts: in the same order, groups side by side.
        stats: of the generation; where batches overlap, of the time since the batch before.
        begun: policies (in batches) behind the weights that its first group was submitted under; None where not known any more.
        refreshed: whether the rollouts were made current (see `refreshing`) instead of learnt from as they were drawn.
    """

    step: int
    requests: list[Request]
    rollouts: list[Rollout]
    stats: RolloutStats
    begun: int | None = None
    refreshed: bool = False


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a source puts into a checkpoint.

    Attributes:
        bandit: the controller's state.
        finished: rollouts of groups that nobody learnt from yet, by group number.
        launches: of their generation, by step, where they are known by step.
        begun: as in `Batch`, by step.
    """

    bandit: Any
    finished: Mapping[int, list[Rollout]] = dataclasses.field(default_factory=dict)
    launches: Mapping[int, tuple[LaunchRecord, ...]] = dataclasses.field(default_factory=dict)
    begun: Mapping[int, int] = dataclasses.field(default_factory=dict)


class Source(Protocol):
    """Where batches come from: the one interface of all modes.

    Attributes:
        bandit: the controller's state; may be set while nothing is generated.
    """

    bandit: Any

    def publish(self, shot: Snapshot, step: int) -> None:
        """The policy that `step` batches made is to be served."""
        ...

    def next(self, step: int) -> Batch:
        """The batch of a step, called with 1, 2, … (or what follows a checkpoint). Waits for it, or generates it."""
        ...

    def more(self, step: int) -> Batch:
        """One more batch for the step, of the prompts that come next.

        Raises:
            ValueError: the mode has drawn those for a later step already.
        """
        ...

    def idle(self, shot: Snapshot) -> contextlib.AbstractContextManager:
        """Nothing is generated within, and the engine serves `shot`: it is the caller's."""
        ...

    def commit(self) -> None:
        """A step ended: what `saved` tells is as of now."""
        ...

    def saved(self) -> Saved:
        """What has to be kept to go on after the last commit."""
        ...

    def numbers(self) -> dict[str, float]:
        """Metrics since the last call."""
        ...

    def verify(self) -> None:
        """Raises what went wrong beside the caller."""
        ...

    def close(self) -> None:
        """Ends what runs; never raises. Safe to call twice."""
        ...


class Maker:
    """Makes the requests of batches, and batches.

    Args:
        start: the cursor after the last batch that was learnt from.
        step: that batch.
    """

    def __init__(self, parts: Parts, config: LoopConfig, start: CursorState, step: int):
        self.parts, self.config = parts, config
        self.lengths = LengthHistory()
        self._ahead, self._drawn = start, step
        self._requests: dict[int, list[Request]] = {}

    def requests(self, step: int) -> list[Request]:
        """The requests of a batch not yet learnt from, the same at every call."""
        while self._drawn < step:
            indices, visits, self._ahead = cursor.draw(self._ahead, self.config.prompts_per_step)
            self._drawn += 1
            self._requests[self._drawn] = requests_of(self.parts, self.config, indices, visits)
        return self._requests[step]

    def forget(self, step: int) -> None:
        """The batch was learnt from."""
        self._requests.pop(step, None)

    def group(self, number: int) -> list[Request]:
        """The requests of one group."""
        size, samples = self.config.prompts_per_step, self.config.group_size
        place = number % size * samples
        return self.requests(number // size + 1)[place : place + samples]

    def batch(
        self, step: int, bandit_state: Any, on_launch: Callable[[LaunchRecord], None], begun: int | None = None
    ) -> tuple[Batch, Any]:
        """Generates a whole batch with what the engine has published; returns the bandit's state too."""
        return self._generate(self.requests(step), step, bandit_state, on_launch, begun)

    def extra(self, step: int, bandit_state: Any, on_launch: Callable[[LaunchRecord], None]) -> tuple[Batch, Any]:
        """One more batch for a step, of the prompts that come next; only where no later batch was drawn yet."""
        indices, visits, self._ahead = cursor.draw(self._ahead, self.config.prompts_per_step)
        return self._generate(requests_of(self.parts, self.config, indices, visits), step, bandit_state, on_launch, step - 1)

    def _generate(
        self, requests: list[Request], step: int, bandit_state: Any, on_launch, begun: int | None
    ) -> tuple[Batch, Any]:
        parts = self.parts
        result = parts.engine.generate(
            requests,
            self.config.sampling,
            parts.bandit,
            bandit_state,
            replay_arms=None if parts.replay is None else parts.replay[step],
            on_launch=on_launch,
            expected_tokens=self.lengths.expected(requests),
            history=parts.history,
        )
        self.lengths.learn(result.rollouts)
        return Batch(step, requests, result.rollouts, result.stats, begun), result.bandit_state

    def serving(self, bandit_state: Any, on_launch: Callable[[LaunchRecord], None], flow: Flow) -> Serving:
        """A generation that goes on over batches, not yet begun."""
        p = self.parts
        more = dict(on_launch=on_launch, history=p.history, flow=flow)
        return p.engine.serving([], self.config.sampling, p.bandit, bandit_state, **more)

    def restored(self, step: int, saved: Saved) -> Batch | None:
        """A batch put together from a checkpoint's groups; None where one is missing."""
        size = self.config.prompts_per_step
        numbers = range((step - 1) * size, step * size)
        if any(n not in saved.finished for n in numbers):
            return None
        rollouts = [r for n in numbers for r in saved.finished[n]]
        return Batch(step, self.requests(step), rollouts, stats_of(saved.launches.get(step, ())), saved.begun.get(step))

    def matching(self, finished: Mapping[int, list[Rollout]]) -> dict[int, list[Rollout]]:
        """Those of a checkpoint's groups that this run asks for too: same prompt, visit and samples, same budget at least."""
        out = {}
        for number, rollouts in finished.items():
            if number // self.config.prompts_per_step >= self.config.steps:
                continue
            asked = [(r.prompt.prompt_id, r.visit, r.sample) for r in self.group(number)]
            law = all(r.sampling == self.config.sampling for r in rollouts)
            fits = all(r.response_length <= self.config.max_new_tokens for r in rollouts)
            if law and fits and asked == [(r.prompt_id, r.visit, r.sample) for r in rollouts]:
                out[number] = list(rollouts)
        return out


def requests_of(parts: Parts, config: LoopConfig, indices: np.ndarray, visits: np.ndarray) -> list[Request]:
    """The requests of drawn prompts."""
    prompts = [parts.train_prompts[int(i)] for i in indices]
    noise_visits = np.zeros_like(visits) if config.reuse_noise else None
    return collect.requests_for(prompts, visits, config.group_size, config.max_new_tokens, noise_visits=noise_visits)


def stats_of(launches: tuple[LaunchRecord, ...], seconds: float | None = None) -> RolloutStats:
    """The stats of launches whose other events are not known."""
    busy = sum(x.seconds for x in launches)
    return RolloutStats(launches, busy if seconds is None else seconds, 0.0, 0.0, busy, 0)
