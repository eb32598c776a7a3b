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
from adrl_jax.rollout.stats import LaunchRecord, RolloutStats
from adrl_jax.types import Request, Rollout, SamplingParams


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A bandit for each group: `init` gives a tuple of states, and `EngineGroup` asks `bandit` with one of them."""

    bandit: Bandit
    groups: int

    def init(self) -> tuple[Any, ...]:
        return tuple(self.bandit.init() for _ in range(self.groups))


class EngineGroup:
    """See the module's docstring; `publish` and `generate` are those of `Engine`.

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
    def drafters(self):
        return self.engines[0].drafters

    @property
    def version(self) -> int:
        return self.engines[0].version

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

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        bandit: Bandit | Grouped,
        bandit_state: Any,
        *,
        replay_arms: Sequence[int] | None = None,
        on_launch: Callable[[LaunchRecord], None] | None = None,
        expected_tokens: Sequence[float] | None = None,
        history: Any = None,
    ) -> GenerateResult:
        """As `Engine.generate`.

        Args:
            bandit: with a state for each group (`Grouped`), or a plain one: then every group begins with its state and the
                first one's is returned.

        Raises:
            ValueError: arms are to be replayed, or there is a history: both are one engine's.
        """
        if replay_arms is not None or history is not None:
            raise ValueError("replay_arms and history are for one engine; this rollout runs on several device groups")
        count = len(self.engines)
        grouped = isinstance(bandit, Grouped)
        states = list(bandit_state) if grouped else [bandit_state] * count
        inner = bandit.bandit if grouped else bandit
        shares = deal(requests, count)

        def job(group: int) -> GenerateResult | None:
            chosen = shares[group]
            if not chosen:
                return None
            with jax.default_device(self.devices[group]):
                return self.engines[group].generate(
                    [requests[i] for i in chosen],
                    sampling,
                    inner,
                    states[group],
                    on_launch=on_launch,
                    expected_tokens=None if expected_tokens is None else [expected_tokens[i] for i in chosen],
                )

        began = time.perf_counter()
        results = self.spot.run([functools.partial(job, group) for group in range(count)])
        seconds = time.perf_counter() - began
        rollouts: list[Rollout | None] = [None] * len(requests)
        for chosen, result in zip(shares, results):
            for i, rollout in zip(chosen, [] if result is None else result.rollouts):
                rollouts[i] = rollout
        states = [s if r is None else r.bandit_state for s, r in zip(states, results)]
        stats = together([r.stats for r in results if r is not None], seconds)
        return GenerateResult(rollouts, tuple(states) if grouped else states[0], stats)


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
