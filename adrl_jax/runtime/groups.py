"""Several engines, each on a device of its own, behind the interface of one; the drafter learns where a share has ended.

Prompts are dealt out in turn, siblings together. Under coupled verification no token depends on who draws it, so a rollout is the
same on any number of devices. Each engine has a bandit state of its own: what its launches cost is known to it alone.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from adrl_jax.bandit.base import Bandit
from adrl_jax.drafter.spot import Spot
from adrl_jax.rollout.engine import Engine, GenerateResult
from adrl_jax.rollout.serving import Serving
from adrl_jax.rollout.stats import RolloutStats
from adrl_jax.types import Request, Rollout, SamplingParams


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A bandit for each group: `init` gives a tuple of states, and `EngineGroup` asks `bandit` with one of them."""

    bandit: Bandit
    groups: int

    def init(self) -> tuple[Any, ...]:
        return tuple(self.bandit.init() for _ in range(self.groups))


class EngineGroup:
    """See the module's docstring; everything public is as in `Engine`, and where it is not the docstring says so.

    Attributes:
        engines, devices: one a group.
        spot: runs the groups, and trains in their tails.
    """

    def __init__(self, engines: Sequence[Engine], devices: Sequence[jax.Device], train: Callable[[int], bool] | None = None):
        """
        Args:
            train: see `drafter.spot.Spot`; None never trains.

        Raises:
            ValueError: not one device an engine, or a device twice.
        """
        if len(engines) != len(devices) or len(set(devices)) != len(devices) or not engines:
            raise ValueError(f"{len(engines)} engines need a device each, got {[str(d) for d in devices]}")
        self.engines, self.devices = tuple(engines), tuple(devices)
        self.spot = Spot((lambda group: False) if train is None else train)

    @property
    def config(self):
        return self.engines[0].config

    @property
    def model_config(self):
        return self.engines[0].model_config

    @property
    def drafters(self):
        return self.engines[0].drafters

    @property
    def programs(self) -> tuple[Any, ...]:
        """Compiled programs of each group: a device compiles its own."""
        return tuple(engine.programs for engine in self.engines)

    @property
    def version(self) -> int:
        return self.engines[0].version

    @property
    def drafter_version(self) -> int:
        return self.engines[0].drafter_version

    @property
    def served(self) -> Any:
        """As `Engine.served`, of the first device."""
        return self.engines[0].served

    def reseed(self, seed: int) -> None:
        """As `Engine.reseed`, of every engine."""
        for engine in self.engines:
            engine.reseed(seed)

    @property
    def params(self) -> Any:
        """What is published, on the first device."""
        return self.engines[0].params

    @property
    def collect(self) -> Callable[[Rollout, np.ndarray], None] | None:
        return self.engines[0].collect

    @collect.setter
    def collect(self, call: Callable[[Rollout, np.ndarray], None] | None) -> None:
        for engine in self.engines:
            engine.collect = call

    def publish(
        self, params: Any, version: int, drafter_params: Mapping[str, Any] | None = None, drafter_version: int = 0
    ) -> None:
        """As `Engine.publish`, a copy on each device."""
        self.spot.wait()
        for engine, device in zip(self.engines, self.devices):
            with jax.default_device(device):
                own, drafters = jax.device_put((params, dict(drafter_params or {})), device)
                engine.publish(own, version, drafters, drafter_version)

    def publish_drafter(self, drafter_params: Mapping[str, Any], drafter_version: int) -> None:
        """As `Engine.publish_drafter`, a copy on each device."""
        self.spot.wait()
        for engine, device in zip(self.engines, self.devices):
            with jax.default_device(device):
                engine.publish_drafter(jax.device_put(dict(drafter_params), device), drafter_version)

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, bandit: Bandit | Grouped, bandit_state: Any, **more: Any
    ) -> GenerateResult:
        """As `Engine.generate`.

        Args:
            bandit: with a state for each group (`Grouped`), or a plain one: then every group begins with its state and the
                first one's is returned.

        Raises:
            ValueError: as there; or arms are to be replayed, there is a history, or requests come while it runs: these are one
                engine's.
        """
        return self.serving(requests, sampling, bandit, bandit_state, **more).run()

    def serving(
        self, requests: Sequence[Request], sampling: SamplingParams, bandit: Bandit | Grouped, bandit_state: Any, **more: Any
    ) -> "GroupServing":
        """As `Engine.serving`: a call of `generate` that has not begun."""
        given = [name for name in ("replay_arms", "history", "flow") if more.get(name) is not None]
        if given:
            raise ValueError(f"{given[0]} is for one engine; this rollout runs on several device groups")
        self.check(requests)
        return GroupServing(self, requests, sampling, bandit, bandit_state, more)

    def check(self, requests: Sequence[Request]) -> None:
        """As `Engine.check`."""
        self.engines[0].check(requests)


class GroupServing:
    """One call of `EngineGroup.generate`; `run` may be called once."""

    def __init__(
        self,
        group: EngineGroup,
        requests: Sequence[Request],
        sampling: SamplingParams,
        bandit: Bandit | Grouped,
        bandit_state: Any,
        more: Mapping[str, Any],
    ):
        count = len(group.engines)
        self._group, self._requests = group, requests
        self._grouped = isinstance(bandit, Grouped)
        self._before = list(bandit_state) if self._grouped else [bandit_state] * count
        self._shares = deal(requests, count)
        inner, expected = bandit.bandit if self._grouped else bandit, more.get("expected_tokens")
        self._calls: list[Serving | None] = [None] * count
        # A group without requests does nothing; but where there are none at all, one engine says what comes of that.
        for i in [i for i in range(count) if self._shares[i]] or [0]:
            chosen = self._shares[i]
            own = dict(more) if expected is None else {**more, "expected_tokens": [expected[k] for k in chosen]}
            with jax.default_device(group.devices[i]):
                self._calls[i] = group.engines[i].serving(
                    [requests[k] for k in chosen], sampling, inner, self._before[i], **own
                )

    @property
    def bandit_state(self) -> Any:
        """How far the bandits are."""
        states = [old if call is None else call.bandit_state for old, call in zip(self._before, self._calls)]
        return tuple(states) if self._grouped else states[0]

    def run(self) -> GenerateResult:
        """Finishes all requests."""

        def job(i: int) -> GenerateResult | None:
            if self._calls[i] is None:
                return None
            with jax.default_device(self._group.devices[i]):
                return self._calls[i].run()

        began = time.perf_counter()
        results = self._group.spot.run([functools.partial(job, i) for i in range(len(self._calls))])
        seconds = time.perf_counter() - began
        rollouts: list[Rollout | None] = [None] * len(self._requests)
        for chosen, result in zip(self._shares, results):
            for k, rollout in zip(chosen, [] if result is None else result.rollouts):
                rollouts[k] = rollout
        stats = together([r.stats for r in results if r is not None], seconds)
        return GenerateResult(rollouts, self.bandit_state, stats)


def deal(requests: Sequence[Request], groups: int) -> list[list[int]]:
    """Indices of each group's requests: prompts in turn, siblings together."""
    order = {g: i for i, g in enumerate(dict.fromkeys(r.group_id for r in requests))}
    return [[i for i, r in enumerate(requests) if order[r.group_id] % groups == group] for group in range(groups)]


def together(stats: Sequence[RolloutStats], seconds: float) -> RolloutStats:
    """One record of several engines that ran at the same time: counts add up, device time is a mean over them."""
    launches = sorted((x for s in stats for x in s.launches), key=lambda x: x.start)
    return RolloutStats(
        launches=tuple(launches),
        seconds=seconds,
        compile_seconds=max(s.compile_seconds for s in stats),
        prefill_seconds=sum(s.prefill_seconds for s in stats) / len(stats),
        device_seconds=sum(s.device_seconds for s in stats) / len(stats),
        programs=sum(s.programs for s in stats),
        events=tuple(sorted((e for s in stats for e in s.events), key=lambda e: e.start)),
    )
