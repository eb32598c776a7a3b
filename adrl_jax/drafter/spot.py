"""Idle devices train the drafter while the rollout's long tail is still running on others.

A rollout is spread over device groups, one thread each. The first group whose share has ended takes the drafter's training over and
makes small steps until the last group has ended; then it stops. Nobody waits for it: `run` returns as soon as the rollout is
over, with a step perhaps still under way on a device that has nothing else to do; `wait` comes before anything touches the trainer.

    rolling out ──(its share has ended)──▶ idle ──(nobody trains yet)──▶ training ──(rollout is over, between steps)──▶ done
"""

import enum
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_PAUSE = 0.02  # seconds until an idle group looks again whether there is something to train on
_SWITCH = 2e-4  # seconds that a thread which wants the interpreter waits at most; 5e-3 is a whole launch of a small model


class Phase(enum.Enum):
    """What a device group does."""

    ROLLOUT = "rollout"
    IDLE = "idle"
    TRAINING = "training"
    DONE = "done"


class SpotStep(NamedTuple):
    """One training step: which group made it, and when, in seconds since `run` began."""

    group: int
    start: float
    end: float


class SpotLog(NamedTuple):
    """What happened in one rollout; times in seconds since `run` began.

    Attributes:
        finished: when each group's share ended.
        over: when the last one ended, and `run` returned.
        steps: in order; only the last may end after `over`.
    """

    finished: tuple[float, ...]
    over: float
    steps: tuple[SpotStep, ...]


class Coordinator:
    """Which group may do what; every change is one locked transition.

    At most one group trains: there is one drafter, and its steps follow each other.
    """

    def __init__(self, groups: int):
        if groups < 1:
            raise ValueError(f"groups={groups!r} must be a positive integer")
        self._lock = threading.Lock()
        self._phases = [Phase.ROLLOUT] * groups
        self.over = threading.Event()

    @property
    def phases(self) -> tuple[Phase, ...]:
        with self._lock:
            return tuple(self._phases)

    def finish(self, group: int) -> None:
        """The group's share of the rollout has ended; the last one ends the rollout."""
        with self._lock:
            self._phases[group] = Phase.IDLE
            if Phase.ROLLOUT not in self._phases:
                self.over.set()

    def may_step(self, group: int) -> bool:
        """Asked before every step: True makes (or keeps) the group the trainer. Never while it rolls out, nor once the rollout is
        over."""
        with self._lock:
            if self.over.is_set() or self._phases[group] is Phase.ROLLOUT:
                return False
            if any(p is Phase.TRAINING for i, p in enumerate(self._phases) if i != group):
                return False
            self._phases[group] = Phase.TRAINING
            return True

    def leave(self, group: int) -> None:
        with self._lock:
            self._phases[group] = Phase.DONE


class Spot:
    """Runs rollouts with training in their tails.

    Args:
        train: `train(group) -> bool` makes one small step on the group's device; False where there was nothing to train on.
        clock: seconds.
    """

    def __init__(self, train: Callable[[int], bool], clock: Callable[[], float] = time.perf_counter):
        self._train, self._clock = train, clock
        self._threads: list[threading.Thread] = []
        self._log: SpotLog | None = None
        self._fault: BaseException | None = None

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Every job's result, in order, as soon as the last has one.

        Args:
            jobs: one a device group.

        Raises:
            the first job's error, once all have ended; see `wait` for those of training.
        """
        self.wait()
        # Packing a lesson is the trainer's only long piece of Python: rollouts that go on must get their turn within it.
        usual = sys.getswitchinterval()
        sys.setswitchinterval(min(usual, _SWITCH))
        coordinator, began = Coordinator(len(jobs)), self._clock()
        results: list[T | None] = [None] * len(jobs)
        faults: list[BaseException] = []
        finished = [0.0] * len(jobs)
        steps: list[SpotStep] = []

        def group(index: int) -> None:
            try:
                results[index] = jobs[index]()
            except BaseException as error:
                faults.append(error)
            finished[index] = self._clock() - began
            coordinator.finish(index)
            try:
                while not coordinator.over.is_set():
                    start = self._clock() - began
                    if not coordinator.may_step(index) or not self._train(index):
                        coordinator.over.wait(_PAUSE)
                        continue
                    steps.append(SpotStep(index, start, self._clock() - began))
            except BaseException as error:
                self._fault = error
            finally:
                coordinator.leave(index)

        self._threads = [threading.Thread(target=group, args=(i,), name=f"group-{i}", daemon=True) for i in range(len(jobs))]
        try:
            for thread in self._threads:
                thread.start()
            coordinator.over.wait()
        finally:
            sys.setswitchinterval(usual)
        self._facts = finished, self._clock() - began, steps
        if faults:
            raise faults[0]
        return results

    def wait(self) -> SpotLog | None:
        """Until no step is under way; the log of the last rollout, None before the first.

        Raises:
            the error that ended its training, if one did.
        """
        for thread in self._threads:
            thread.join()
        if self._threads:
            finished, over, steps = self._facts
            self._log, self._threads = SpotLog(tuple(finished), over, tuple(steps)), []
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        return self._log
