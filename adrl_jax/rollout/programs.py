"""Compiled programs by name: compiled ahead of time on first use, counted, and timed apart from running.

A program is one function at one set of shapes. The set is small (strategy x batch bucket x cache bucket) and never grows
by accident: whoever asks names the key.
"""

import time
from collections.abc import Callable, Hashable
from typing import Any

import jax


class Programs:
    """A cache of compiled functions.

    Attributes:
        compile_seconds: spent compiling so far.
    """

    def __init__(self):
        self._compiled: dict[Hashable, Any] = {}
        self.compile_seconds = 0.0

    def __len__(self) -> int:
        return len(self._compiled)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._compiled

    def get(self, key: Hashable, function: Callable, args: tuple, donate: tuple[int, ...] = ()) -> Callable:
        """The program `key`; compiles `function` for the shapes of `args` when it is new.

        Args:
            donate: positions in `args` whose buffers the program may overwrite.
        """
        if key not in self._compiled:
            start = time.perf_counter()
            self._compiled[key] = jax.jit(function, donate_argnums=donate).lower(*args).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[key]
