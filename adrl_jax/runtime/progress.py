"""What a person sees while a run goes on: a bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm

_LINE_SECONDS = 10.0


class Progress:
    """One phase's progress.

    Args:
        name: of the phase.
        total: its steps.
        done: steps behind it already.
        stream: a bar where it is a terminal, else a line at most every 10 seconds and one for the last step.
    """

    def __init__(self, name: str, total: int, done: int = 0, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._name, self._total, self._done = name, total, done
        self._began, self._printed = time.monotonic(), 0.0
        self._values: dict[str, Any] = {}
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(total=total, initial=done, desc=name, file=self._stream, dynamic_ncols=True, leave=True)

    def show(self, **values: Any) -> None:
        """Updates figures within a step (on a terminal only)."""
        self._values.update(values)
        if self._bar is not None:
            self._bar.set_postfix_str(describe(self._values))

    def step(self, **values: Any) -> None:
        """One step is done; `values` are its figures."""
        self._values.update(values)
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(describe(self._values), refresh=False)
            self._bar.update()
            return
        now = time.monotonic()
        if self._done == self._total or now - self._printed >= _LINE_SECONDS:
            self._printed = now
            print(
                f"[{now - self._began:6.0f} s] {self._name} {self._done}/{self._total}  {describe(self._values)}",
                file=self._stream,
                flush=True,
            )

    def note(self, text: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def describe(values: Mapping[str, Any]) -> str:
    """`reward 0.52  tokens/s 1830  accept 3.1  arm eagle-d4`."""

    def text(value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"

    return "  ".join(f"{name.replace('_', ' ')} {text(value)}" for name, value in values.items() if value is not None)
