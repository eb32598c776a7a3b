"""A discrete-event model of generation and learning: who waits for whom, at any scale.

Engines decode rows of requests; a round gives each running row one token (or what a launch gives) and takes as long as the
latency curve says for so many rows. Responses enter in order as admission control allows, batches are learnt from in order,
and each update publishes a version. One model for all schedules:

* `sync`: limit 0, all devices generate, then all learn;
* `one_step`: limit 1, devices divided; a batch begins when the one before is generated, with the newest weights;
* `in_flight`: any limit, devices divided; rows are refilled at once and new weights enter running requests.
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

SCHEDULES = ("sync", "one_step", "in_flight")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the devices can do.

    Attributes:
        round_s: by rows running on an engine, seconds of a round; in between it is interpolated, beyond it is the last.
        tokens: that a row gains in a round.
        rows: most rows of an engine.
        update_s: seconds of the update of one batch on all the devices that learn, by their number.
        publish_s: from the end of an update until engines serve its weights.
    """

    round_s: Mapping[int, float]
    tokens: float
    rows: int
    update_s: Callable[[int], float]
    publish_s: float = 0.0

    def seconds(self, rows: int) -> float:
        """Of a round with so many rows."""
        return float(np.interp(rows, sorted(self.round_s), [self.round_s[k] for k in sorted(self.round_s)]))


class Outcome(NamedTuple):
    """What a schedule comes to.

    Attributes:
        step_s: seconds from update to update, the first ones left out.
        generator_busy, learner_busy: share of time in which an engine's row, or the learner, works.
        utilization: share of all devices' time that is work (generation counts by rows in use).
        staleness_mean, staleness_max: in versions; of a response the mean of its first and its last token's age.
    """

    step_s: float
    generator_busy: float
    learner_busy: float
    utilization: float
    staleness_mean: float
    staleness_max: float


@dataclasses.dataclass
class _Engine:
    """Rows that advance together. `clock` counts rounds; a response is done when it reaches its own."""

    clock: float = 0.0
    at: float = 0.0
    ends: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    epoch: int = 0


class _Simulation:
    def __init__(
        self, machine: Machine, lengths: Iterator[int], engines: int, batch: int, limit: int, steps: int, barrier: bool
    ):
        self.machine, self.lengths, self.batch, self.limit, self.steps, self.barrier = (
            machine,
            lengths,
            batch,
            limit,
            steps,
            barrier,
        )
        self.engines = [_Engine() for _ in range(engines)]
        self.free = [machine.rows] * engines
        self.open = set(range(engines))  # engines with free rows
        self.events: list[tuple[float, int, int, int]] = []  # time, engine (-1: an update ends), epoch, order
        self.submitted, self.version, self.learnt = 0, 0, 0
        self.left: dict[int, int] = {}
        self.begun: dict[int, int] = {}
        self.of_engine: dict[int, int] = {}
        self.learning = False
        self.update_ends: list[float] = []
        self.row_seconds = self.learn_seconds = 0.0
        self.ages: list[tuple[float, int]] = []
        self.now = 0.0

    def run(self, update_s: float) -> None:
        self._admit()
        while self.learnt < self.steps and self.events:
            self.now, index, epoch, _ = heapq.heappop(self.events)
            if index < 0:
                self._updated()
            elif epoch == self.engines[index].epoch:
                self._finish(index)
            self._learn(update_s)

    def _may_begin(self) -> bool:
        if self.submitted >= min((self.limit + self.version + 1), self.steps) * self.batch:
            return False
        number = self.submitted // self.batch
        return not (self.barrier and number > 0 and self.left.get(number - 1, 0) > 0)

    def _admit(self) -> None:
        """Fills free rows, one engine after the other, as far as requests may begin."""
        if not self.open or not self._may_begin():
            return
        touched: dict[int, list[int]] = {}
        order = sorted(self.open, key=lambda i: (-self.free[i], i))
        while order and self._may_begin():
            for index in list(order):
                if not self._may_begin():
                    break
                touched.setdefault(index, []).append(self.submitted)
                number = self.submitted // self.batch
                self.left[number] = self.left.get(number, self.batch)
                self.begun[self.submitted] = self.version
                self.submitted += 1
                self.free[index] -= 1
                if not self.free[index]:
                    order.remove(index)
                    self.open.discard(index)
        for index, fresh in touched.items():
            self._advance(index)
            engine = self.engines[index]
            for response in fresh:
                rounds = max(1, int(np.ceil(next(self.lengths) / self.machine.tokens)))
                heapq.heappush(engine.ends, (engine.clock + rounds, response))
            self._next(index)

    def _advance(self, index: int) -> None:
        engine = self.engines[index]
        rows, passed = len(engine.ends), self.now - engine.at
        if rows:
            engine.clock += passed / self.machine.seconds(rows)
            self.row_seconds += passed * rows
        engine.at = self.now

    def _next(self, index: int) -> None:
        engine = self.engines[index]
        engine.epoch += 1
        if engine.ends:
            wait = max(engine.ends[0][0] - engine.clock, 0.0) * self.machine.seconds(len(engine.ends))
            heapq.heappush(self.events, (self.now + wait, index, engine.epoch, len(self.begun)))

    def _finish(self, index: int) -> None:
        self._advance(index)
        engine = self.engines[index]
        while engine.ends and engine.ends[0][0] <= engine.clock + 1e-6:
            _, response = heapq.heappop(engine.ends)
            number = response // self.batch
            self.left[number] -= 1
            self.free[index] += 1
            self.open.add(index)
            begun = self.begun.pop(response)
            last = begun if self.barrier or self.limit == 0 else self.version
            self.ages.append((number - (begun + last) / 2, number - begun))
        self._next(index)
        self._admit()

    def _learn(self, update_s: float) -> None:
        if not self.learning and self.left.get(self.learnt, 1) == 0:
            self.learning = True
            self.learn_seconds += update_s
            heapq.heappush(self.events, (self.now + update_s + self.machine.publish_s, -1, 0, 0))

    def _updated(self) -> None:
        self.learning = False
        self.update_ends.append(self.now)
        self.learnt += 1
        self.version += 1
        self._admit()


def simulate(
    schedule: str,
    machine: Machine,
    lengths: Sequence[int],
    *,
    devices: int,
    learners: int | None = None,
    devices_per_engine: int = 1,
    batch: int,
    limit: int = 1,
    steps: int = 12,
) -> Outcome:
    """Runs a schedule over `steps` batches.

    Args:
        lengths: response lengths in tokens, repeated in order as often as needed.
        devices: all of them.
        learners: of them learn, where devices are divided; half when None.
        devices_per_engine: of generation.
        batch: responses of a batch.
        limit: staleness limit of `in_flight`.

    Raises:
        ValueError: unknown schedule, or a side without devices.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    divided = schedule != "sync"
    learners = (devices // 2 if learners is None else learners) if divided else devices
    engines = (devices - learners if divided else devices) // devices_per_engine
    if learners < 1 or engines < 1:
        raise ValueError(f"devices={devices}, learners={learners}, devices_per_engine={devices_per_engine}: a side has none")
    limit = {"sync": 0, "one_step": 1}.get(schedule, limit)
    endless = (lengths[i % len(lengths)] for i in range(10**9))
    world = _Simulation(machine, endless, engines, batch, limit, steps, barrier=schedule == "one_step")
    world.run(machine.update_s(learners))
    skipped = min(3, len(world.update_ends) - 1)
    ends = world.update_ends
    step = (ends[-1] - ends[skipped - 1]) / (len(ends) - skipped) if skipped else ends[-1] / len(ends)
    total = ends[-1]
    generator = world.row_seconds / (total * engines * machine.rows)
    learner = world.learn_seconds / total
    weight = engines * devices_per_engine, learners
    work = generator * weight[0] + learner * weight[1]
    ages = np.array(world.ages)
    return Outcome(step, generator, learner, work / devices, float(ages[:, 0].mean()), float(ages[:, 1].max()))
