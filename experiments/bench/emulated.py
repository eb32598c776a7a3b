"""An accelerator that is not there: responses recorded from a real run are handed out at the pace of recorded launches.

It has the engine's interface as far as the runtime uses it (`publish`, `check`, `generate`, `serving`) and costs no computing:
a launch is a sleep. So generation and learning can be overlapped on a machine whose cores are all busy already, as they are
where generator and learner have chips of their own.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from adrl_jax.rollout.engine import Flow, GenerateResult
from adrl_jax.rollout.stats import LaunchRecord, RolloutStats
from adrl_jax.types import Request, Rollout

Key = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long launches take and how far they come.

    Attributes:
        seconds: by requests running, of one launch; between and beyond them the nearest is taken.
        tokens: that one request gains in one launch.
        rows: requests that run at once.
    """

    seconds: Mapping[int, float]
    tokens: float
    rows: int

    @classmethod
    def of(cls, launches: Iterable[LaunchRecord], rows: int, scale: float = 1.0) -> "Pace":
        """The pace of recorded launches, `scale` times as slow; those that compiled are left out."""
        by_running: dict[int, list[float]] = {}
        gained, running = 0, 0
        for x in launches:
            gained, running = gained + x.tokens, running + x.running
            if not x.compiled:
                by_running.setdefault(x.running, []).append(x.seconds)
        return cls({n: scale * statistics.median(s) for n, s in by_running.items()}, gained / running, rows)

    def launch_s(self, running: int) -> float:
        """Seconds of a launch."""
        return self.seconds[min(self.seconds, key=lambda n: (abs(n - running), n))]

    def scaled(self, factor: float) -> "Pace":
        return dataclasses.replace(self, seconds={n: factor * s for n, s in self.seconds.items()})


class Emulated:
    """Hands out recorded responses.

    Args:
        recorded: by (prompt_id, visit, sample); a request for another one is an error.
        pace: of its launches.
    """

    def __init__(self, recorded: Mapping[Key, Rollout], pace: Pace):
        self._recorded, self.pace = dict(recorded), pace
        self.version = -1
        self.params: Any = None

    def publish(self, params: Any, version: int, drafter_params: Any = None, drafter_version: int = 0) -> None:
        self.params, self.version = params, version

    def check(self, requests: Sequence[Request]) -> None:
        """Raises KeyError for a request that was not recorded."""
        for r in requests:
            self._recorded[r.prompt.prompt_id, r.visit, r.sample]

    def generate(
        self, requests: Sequence[Request], sampling: Any, bandit: Any, bandit_state: Any, **how: Any
    ) -> GenerateResult:
        """As `Engine.generate`; the bandit is not asked."""
        return self.serving(requests, sampling, bandit, bandit_state, **how).run()

    def serving(
        self,
        requests: Sequence[Request],
        sampling: Any,
        bandit: Any,
        bandit_state: Any,
        *,
        on_launch: Callable[[LaunchRecord], None] | None = None,
        flow: Flow | None = None,
        **_: Any,
    ) -> "_Serving":
        return _Serving(self, list(requests), bandit_state, on_launch, flow or Flow())

    def rollout(self, request: Request, versions: Sequence[int]) -> Rollout:
        """The recorded response, with versions of this run: one entry a launch, spread over the tokens."""
        r = self._recorded[request.prompt.prompt_id, request.visit, request.sample]
        places = np.minimum(np.arange(r.response_length) * len(versions) // r.response_length, len(versions) - 1)
        drawn = np.asarray(versions, np.int32)[places]
        return dataclasses.replace(r, policy_versions=drawn, group_id=request.group_id)

    def length(self, request: Request) -> int:
        return self._recorded[request.prompt.prompt_id, request.visit, request.sample].response_length


class _Serving:
    """One call, batch by batch or in flight."""

    def __init__(self, engine: Emulated, requests: list[Request], bandit_state: Any, on_launch, flow: Flow):
        self.engine, self.requests, self.bandit_state = engine, requests, bandit_state
        self._on_launch, self._flow = on_launch, flow

    def run(self) -> GenerateResult:
        pace, flow, began = self.engine.pace, self._flow, time.perf_counter()
        waiting, running, done, launches = list(range(len(self.requests))), {}, {}, []
        first = self.engine.version
        while True:
            if flow.feed is not None and (room := pace.rows - len(running) - len(waiting)) > 0:
                fresh = flow.feed(room, not (running or waiting))
                if fresh is None and not (running or waiting):
                    break
                waiting += range(len(self.requests), len(self.requests) + len(fresh or []))
                self.requests += fresh or []
            elif flow.feed is None and not (running or waiting):
                break
            while waiting and len(running) < pace.rows:
                running[waiting.pop(0)] = [0.0, []]
            if not running:
                continue
            start, count = time.perf_counter() - began, len(running)
            time.sleep(pace.launch_s(count))
            gained = 0
            for index, progress in list(running.items()):
                progress[0] += pace.tokens
                progress[1].append(self.engine.version if flow.cache else first)
                gained += int(pace.tokens)
                if progress[0] >= self.engine.length(self.requests[index]):
                    rollout = self.engine.rollout(self.requests[index], running.pop(index)[1])
                    if flow.finished is None:
                        done[index] = rollout
                    else:
                        flow.finished([(index, rollout)])
            seconds = time.perf_counter() - began - start
            record = LaunchRecord(0, count, pace.rows, 0, 1, max(gained, 1), seconds, start, False, 0, 0)
            if flow.feed is None:
                launches.append(record)
            if self._on_launch is not None:
                self._on_launch(record)
        spent = time.perf_counter() - began
        busy = sum(x.seconds for x in launches)
        stats = RolloutStats(tuple(launches), spent, 0.0, 0.0, busy, 0)
        return GenerateResult([done[i] for i in sorted(done)], self.bandit_state, stats)


class Recorder:
    """The engine, with every response kept by its key."""

    def __init__(self, engine: Any):
        self._engine = engine
        self.recorded: dict[Key, Rollout] = {}
        self.launches: list[LaunchRecord] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Sequence[Request], *args: Any, **how: Any) -> GenerateResult:
        result = self._engine.generate(requests, *args, **how)
        for request, rollout in zip(requests, result.rollouts, strict=True):
            self.recorded[request.prompt.prompt_id, request.visit, request.sample] = rollout
        self.launches += result.stats.launches
        return result
