"""Ending a run on request: SIGTERM (and the first ctrl-C) asks, the loop saves and leaves."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class StopRequested(Exception):
    """Raised inside the loop at the next safe point after the request."""


class Stop:
    """The request. `check` raises once it was made."""

    def __init__(self):
        self._event = threading.Event()

    def request(self) -> None:
        self._event.set()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raises:
        StopRequested: the run was asked to end.
        """
        if self._event.is_set():
            raise StopRequested


@contextlib.contextmanager
def on_signals(stop: Stop, signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)) -> Iterator[None]:
    """Turns the first of `signals` into a request; a second one acts as if nobody had listened.

    Python delivers signals to the main thread only; elsewhere this does nothing and the caller's `stop` is the way.
    """
    previous = {}
    if threading.current_thread() is not threading.main_thread():
        signals = ()

    def handle(number, frame):
        del frame
        stop.request()
        signal.signal(number, previous[number])

    for number in signals:
        previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
