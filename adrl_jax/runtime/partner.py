"""One host thread beside the main one, and how the two speak: waits that cannot dead-lock, a pulse, the first error.

The thread calls `breathe` often: it is the sign of life, the place where it rests while others need it quiet, and where it
ends when asked to. Others wait with `attend`, which ends with the thread's error, or when its pulse stops.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

_TICK = 0.05  # seconds between two looks while waiting: what a lost wake-up can cost at most
_PATIENCE = 2.0  # seconds that an ending thread is waited for before the error is told


class Stalled(RuntimeError):
    """The other side gives no sign of life."""


class Ended(BaseException):
    """Raised inside the thread to unwind it. No `Exception`, so that nothing on the way takes it for a failure."""


class Partner:
    """A thread that runs `work` once.

    Args:
        name: for messages.
        work: what it does; it calls `breathe` and `wait` of this object.
        silence_s: longest time without a breath before waiting for it is an error, in seconds; compilation counts.
        check: called by those who wait; may raise to end the wait.

    Attributes:
        cond: guards whatever the two sides share.
        waited: seconds that the thread spent in `wait`, while others found it had nothing to do.
    """

    def __init__(self, name: str, work: Callable[[], None], *, silence_s: float, check: Callable[[], None] = lambda: None):
        self.name, self._work, self._silence_s, self._check = name, work, silence_s, check
        self.cond = threading.Condition(threading.RLock())
        self.waited = 0.0
        self._error: BaseException | None = None
        self._ending = self._resting = self._finished = False
        self._pauses = 0
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._began = False

    def start(self) -> None:
        self._beat, self._began = time.monotonic(), True
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Ended:
            pass
        except BaseException as error:
            self._error = error
        with self.cond:
            self._finished = True
            self.cond.notify_all()

    # The thread's side.

    def breathe(self) -> None:
        """Raises:
        Ended: it is time to go.
        """
        with self.cond:
            self._beat = time.monotonic()
            while self._pauses and not self._ending:
                self._resting = True
                self.cond.notify_all()
                self.cond.wait(_TICK)
                self._beat = time.monotonic()
            self._resting = False
            if self._ending:
                raise Ended

    def wait(self, ready: Callable[[], T | None]) -> T:
        """Waits until `ready()`, called under `cond`, is not None."""
        began = time.monotonic()
        with self.cond:
            while (found := ready()) is None:
                self.cond.wait(_TICK)
                self.breathe()
            self.waited += time.monotonic() - began
            return found

    # Everybody else's side.

    @property
    def began(self) -> bool:
        return self._began

    @property
    def running(self) -> bool:
        return self._began and not self._finished

    def verify(self) -> None:
        """Raises the thread's error, where it has one."""
        if self._error is not None:
            raise self._error

    def attend(self, ready: Callable[[], T | None], what: str) -> T:
        """Waits until `ready()`, called under `cond`, is not None.

        Raises:
            Stalled: the thread is silent for too long, or has ended without what is waited for.
            Exception: what the thread failed with, or what `check` raised.
        """
        with self.cond:
            while True:
                self._check()
                self.verify()
                found = ready()
                if found is not None:
                    return found
                if self._finished:
                    raise Stalled(f"the {self.name} has ended while {what} was waited for")
                silent = time.monotonic() - self._beat
                if silent > self._silence_s:
                    raise Stalled(
                        f"the {self.name} gave no sign of life for {silent:.1f} s while {what} was waited for "
                        f"(limit {self._silence_s:g} s)"
                    )
                self.cond.wait(_TICK)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """The thread rests within, at a place where what it shares is whole. May be nested."""
        with self.cond:
            self._pauses += 1
        try:
            if self.running:
                self.attend(lambda: True if self._resting or self._finished else None, "a pause")
            yield
        finally:
            with self.cond:
                self._pauses -= 1
                if not self._pauses:
                    self._resting = False
                self.cond.notify_all()

    def close(self) -> bool:
        """Asks the thread to end and waits a little; True where it has. A device call under way is not cut short: the thread
        ends right after it."""
        with self.cond:
            self._ending = True
            self.cond.notify_all()
        if self._began:
            self._thread.join(_PATIENCE)
        return not self._thread.is_alive()
