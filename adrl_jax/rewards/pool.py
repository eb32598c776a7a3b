"""Scorers in processes of their own, each call with a time limit that holds off the main thread too.

A scorer may hang in C code, in a regular expression or in symbolic algebra, where signals and threads cannot reach it. So
every call runs in a worker process; one that exceeds the limit is killed, its call counted as a time-out worth 0, and a new
worker takes its place.
"""

import collections
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection as mp_connection
from typing import Any

from adrl_jax.types import Score

ON_ERROR = ("raise", "zero")


class ScorerPool:
    """Calls `scorer` in worker processes. Usable from any thread; calls of several threads take turns.

    Args:
        scorer: `(*arguments) -> Score`. It and its arguments must be picklable and importable from a module (not `__main__`).
        workers: processes, started when first needed.
        timeout_s: limit for one call, in seconds.
        on_error: what an exception in the scorer means. `raise`: the batch ends with that exception, the worker's
            traceback in its notes, since a faulty reward function would train towards nothing. `zero`: the call is worth 0
            with reason `error` and counted.
        start_timeout_s: limit for a worker to import the scorer.

    Attributes:
        counts: calls, time-outs, errors and restarts so far, by these names: `calls`, `timeout`, `error`, `restart`.
    """

    def __init__(
        self,
        scorer: Callable[..., Score],
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        on_error: str = "raise",
        start_timeout_s: float = 120.0,
    ):
        if not isinstance(workers, int) or workers < 1:
            raise ValueError(f"workers={workers!r} must be a positive integer")
        if not 0 < timeout_s < 1e6:
            raise ValueError(f"timeout_s={timeout_s!r} must be in (0, 1e6) seconds")
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error={on_error!r} is unknown; choose one of {', '.join(ON_ERROR)}")
        if getattr(scorer, "__module__", None) == "__main__":
            raise ValueError(f"scorer {scorer!r} is defined in __main__; worker processes can only import it from a module")
        self._payload = pickle.dumps((scorer, timeout_s))
        self._timeout_s, self._on_error, self._start_timeout_s = timeout_s, on_error, start_timeout_s
        self._slots: list[_Worker | None] = [None] * workers
        self._lock = threading.Lock()
        self._closed = False
        self.counts: collections.Counter[str] = collections.Counter()

    def score(self, calls: Sequence[tuple]) -> list[Score]:
        """Scores of `scorer(*call)` for each call, in order.

        Raises:
            ValueError: the pool is closed.
            RuntimeError: a worker could not start.
            Exception: whatever the scorer raised, with `on_error="raise"`.
        """
        with self._lock:
            if self._closed:
                raise ValueError("the pool is closed")
            try:
                return self._score(calls)
            except BaseException:
                self._stop()  # answers still under way must not meet the next batch
                raise

    def _score(self, calls: Sequence[tuple]) -> list[Score]:
        scores: dict[int, Score] = {}
        waiting = collections.deque(range(len(calls)))
        while len(scores) < len(calls):
            self._hand_out(calls, waiting)
            busy = [w for w in self._slots if w is not None and w.call is not None]
            wait_s = max(0.0, min(w.deadline for w in busy) - time.monotonic())
            readable = mp_connection.wait([w.connection for w in busy], wait_s)
            for worker in busy:
                if worker.connection in readable:
                    self._collect(worker, scores)
                elif time.monotonic() >= worker.deadline:
                    self._give_up(worker, scores)
        self.counts["calls"] += len(calls)
        return [scores[i] for i in range(len(calls))]

    def _hand_out(self, calls: Sequence[tuple], waiting: collections.deque) -> None:
        idle = [i for i, w in enumerate(self._slots) if w is None or w.call is None][: len(waiting)]
        for i in idle:  # all at once: starting is slow
            if self._slots[i] is not None and self._slots[i].died():
                self._replace(self._slots[i])
            if self._slots[i] is None:
                self._slots[i] = _Worker(self._payload)
        for i in idle:
            worker = self._slots[i]
            worker.wait_until_ready(self._start_timeout_s)
            if waiting:
                index = waiting.popleft()
                worker.start_call(index, calls[index], self._timeout_s)

    def _collect(self, worker: "_Worker", scores: dict[int, Score]) -> None:
        index = worker.call
        try:
            kind, answer = worker.connection.recv()
        except (EOFError, ConnectionError):
            code = self._replace(worker)
            self._fail(index, RuntimeError(f"the scorer's process died with exit code {code} (call {index})"), "", scores)
            return
        worker.call = None
        if kind == "error":
            self._fail(index, *answer, scores)
        elif not isinstance(answer, Score):
            self._fail(index, TypeError(f"the scorer returned {type(answer).__name__}, not a Score (call {index})"), "", scores)
        else:
            scores[index] = answer

    def _fail(self, index: int, error: Exception, trace: str, scores: dict[int, Score]) -> None:
        self.counts["error"] += 1
        if self._on_error == "raise":
            if trace:
                error.add_note(f"raised in the scorer's process:\n{trace}")
            raise error
        scores[index] = Score(0.0, None, "error", detail=f"{type(error).__name__}: {error}")

    def _give_up(self, worker: "_Worker", scores: dict[int, Score]) -> None:
        index = worker.call
        self._replace(worker)
        self.counts["timeout"] += 1
        scores[index] = Score(0.0, None, "timeout", detail=f"no score within {self._timeout_s:g} s")

    def _replace(self, worker: "_Worker") -> int:
        self._slots[self._slots.index(worker)] = None
        self.counts["restart"] += 1
        return worker.kill()

    def _stop(self) -> None:
        for i, worker in enumerate(self._slots):
            if worker is not None:
                worker.kill()
                self._slots[i] = None

    def close(self) -> None:
        """Ends all workers. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._stop()

    def __enter__(self) -> "ScorerPool":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


class _Worker:
    """One process. `call` is the index of the call it works on, None while idle."""

    def __init__(self, payload: bytes):
        ours, theirs = socket.socketpair()
        with theirs:
            # A fresh interpreter, not a fork: forking a process that runs JAX's threads deadlocks.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "adrl_jax.rewards.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # accelerators belong to the parent
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "JAX_PLATFORMS": "cpu"},
            )
        self.connection = mp_connection.Connection(ours.detach())
        self.call: int | None = None
        self.deadline = 0.0
        self._payload: bytes | None = payload

    def wait_until_ready(self, timeout_s: float) -> None:
        """Hands over the scorer and waits until it is imported; returns at once the second time."""
        if self._payload is None:
            return
        try:
            self.connection.send_bytes(self._payload)
            ready = self.connection.poll(timeout_s) and self.connection.recv()[0] == "ready"
        except (EOFError, ConnectionError):
            ready = False
        if not ready:
            code = self.kill()
            raise RuntimeError(
                f"a scorer process did not start within {timeout_s:g} s (exit code {code}); its error is on stderr"
            )
        self._payload = None

    def died(self) -> bool:
        return self._process.poll() is not None

    def start_call(self, index: int, arguments: tuple, timeout_s: float) -> None:
        self.call = index
        self.connection.send(arguments)
        self.deadline = time.monotonic() + timeout_s

    def kill(self) -> int:
        """Ends the process at once and returns its exit code."""
        self.connection.close()
        self._process.kill()
        return self._process.wait()
