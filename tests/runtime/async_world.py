"""Runs of all modes that take seconds: one layer, no warm start, no drafter that learns, weights that move a lot."""

import contextlib
import dataclasses

from loop_world import by_length, settings

from adrl_jax.runtime import loop
from experiments import build, resolve

MODES = {
    "sync": {},
    "lagged": {"runtime.lag": 2},
    "overlap": {"runtime.max_staleness": 2},
    "pinned": {"runtime.mode": "overlap", "runtime.max_staleness": 2, "runtime.pin_versions": True},
    "in_flight": {"runtime.max_staleness": 2},
    "recompute": {"runtime.mode": "in_flight", "runtime.max_staleness": 2, "runtime.in_flight_cache": "recompute"},
}


def small(mode="sync", **changes):
    base = {
        "runtime.mode": mode,
        "warm_start.steps": 0,
        "train.steps": 6,
        "rollout.strategies": ("off", "ngram-d2"),
        "rollout.rounds_per_launch": 3,
        "bandit.name": "fixed",
        "bandit.arm": "ngram-d2",
        "learner.learning_rate": 0.02,
        "learner.minibatches": 1,
        "log.compare_repeats": 0,
        "log.report": False,
        "log.samples_per_step": 99,
        "checkpoint.every": 100,
    }
    return settings(**(base | MODES.get(mode, {}) | changes))


class Worlds:
    """Parts are built once for each place where generation happens, so that each program is compiled once."""

    def __init__(self, stack: contextlib.ExitStack):
        self._stack, self._parts = stack, {}

    def parts(self, c):
        apart = c.runtime.mode in ("overlap", "in_flight")
        if apart not in self._parts:
            self._parts[apart] = self._stack.enter_context(build.opened(c))
        return self._parts[apart]

    def run(self, workdir, mode="sync", *, stopper=None, parts=(), **changes):
        """Runs `mode` in `workdir` with the reward `by_length`; `parts` replaces some of the pieces."""
        c = small(mode, **changes)
        pieces = dataclasses.replace(self.parts(c), **({"scorer": by_length} | dict(parts)))
        return loop.run(pieces, resolve.loop_config(c), workdir, stopper)
