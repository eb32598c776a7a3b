"""What may be wrong with a run that goes on: updates that were skipped, and metrics past their published bounds."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adrl_jax.learner import alerts
from adrl_jax.learner.update import LearnerState
from adrl_jax.runtime import numbers
from adrl_jax.types import PackedBatch

log = logging.getLogger("adrl_jax")


class UpdateError(RuntimeError):
    """Loss or gradient were not finite in too many updates in a row."""


class Health:
    """Counts and warns.

    Args:
        max_nonfinite: updates in a row that may be skipped because loss or gradient were not finite.
    """

    def __init__(self, max_nonfinite: int):
        self._most, self._in_a_row = max_nonfinite, 0
        self._alarmed: set[str] = set()

    def apply(
        self,
        update: Callable[[LearnerState, PackedBatch], tuple[LearnerState, Mapping[str, Any]]],
        learner: LearnerState,
        batches: Sequence[PackedBatch],
    ) -> tuple[LearnerState, list[dict[str, float]]]:
        """Runs the updates of a step; returns the learner and their metrics.

        Raises:
            UpdateError: too many in a row were not finite.
        """
        found = []
        for batch in batches:
            learner, values = update(learner, batch)
            found.append(values)
        found = [numbers.on_host(values) for values in found]
        for values in found:
            self._in_a_row = self._in_a_row + 1 if values.get("nonfinite") else 0
            if self._in_a_row > self._most:
                raise UpdateError(
                    f"loss or gradient was not finite in {self._in_a_row} updates in a row (learner.max_nonfinite={self._most}); "
                    f"the last had loss {values['loss']!r} and gradient norm {values['grad_norm']!r}. Lower learner.learning_rate, "
                    "or look at rewards and mismatch/* in metrics.jsonl"
                )
        return learner, found

    def watch(self, row: Mapping[str, float]) -> None:
        """One warning line when a metric leaves its published bounds, and again only after it has come back."""
        found = alerts.crossed(row)
        for name in found.keys() - self._alarmed:
            log.warning("%s", found[name])
        self._alarmed = set(found)
