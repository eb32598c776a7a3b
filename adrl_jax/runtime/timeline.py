"""Who worked when, over a whole run, as a trace for Perfetto: generator, learner, publishing, refresh, and the queue's depth."""

import collections
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LANES = ("generator", "learner", "publish", "refresh", "evaluate")
_KEPT = 50_000  # events; the oldest go first


class Timeline:
    """Events of several threads in seconds since the timeline began."""

    def __init__(self):
        self._begin = time.perf_counter()
        self._lock = threading.Lock()
        self._events: collections.deque[dict[str, Any]] = collections.deque(maxlen=_KEPT)

    def now(self) -> float:
        return time.perf_counter() - self._begin

    def add(self, lane: str, name: str, seconds: float, **facts: Any) -> None:
        """Work that ends now and took `seconds`.

        Raises:
            ValueError: there is no such lane.
        """
        if lane not in LANES:
            raise ValueError(f"lane={lane!r} is unknown; choose one of {', '.join(LANES)}")
        event = {"ph": "X", "pid": 0, "tid": LANES.index(lane), "name": name, "dur": 1e6 * seconds, "args": facts}
        with self._lock:
            self._events.append(event | {"ts": 1e6 * (self.now() - seconds)})

    def count(self, name: str, value: float) -> None:
        """A number that holds from now on."""
        with self._lock:
            self._events.append({"ph": "C", "pid": 0, "name": name, "ts": 1e6 * self.now(), "args": {"value": value}})

    @contextlib.contextmanager
    def span(self, lane: str, name: str, **facts: Any) -> Iterator[None]:
        """Work within."""
        began = self.now()
        yield
        self.add(lane, name, self.now() - began, **facts)

    def events(self) -> list[dict[str, Any]]:
        """All events, lanes named."""
        out: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "run"}}]
        for i, lane in enumerate(LANES):
            out.append({"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": lane}})
            out.append({"ph": "M", "pid": 0, "tid": i, "name": "thread_sort_index", "args": {"sort_index": i}})
        with self._lock:
            return out + list(self._events)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))
