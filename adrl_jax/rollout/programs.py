"""Compiled programs by name: compiled ahead of time on first use, counted, and timed apart from running.

A program is one function at one set of shapes. The set is small (strategy x batch bucket x cache bucket) and never grows
by accident: whoever runs a program names its key, and other shapes under the same key are refused by the program itself.
"""

import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax


class Programs:
    """A set of compiled functions.

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

    def keys(self) -> Iterable[Hashable]:
        return self._compiled.keys()

    def compile(self, key: Hashable, function: Callable, args: tuple, donate: tuple[int, ...] = ()) -> None:
        """Compiles `function` for the shapes of `args`, unless `key` is there already.

        Args:
            donate: positions in `args` whose buffers the program may overwrite.
        """
        if key in self._compiled:
            return
        start = time.perf_counter()
        self._compiled[key] = jax.jit(function, donate_argnums=donate).lower(*args).compile()
        self.compile_seconds += time.perf_counter() - start

    def __call__(self, key: Hashable, function: Callable, args: tuple, donate: tuple[int, ...] = ()) -> Any:
        """Runs the program `key` on `args`; compiles it first where it is new."""
        self.compile(key, function, args, donate)
        return self._compiled[key](*args)
