"""Who may be generated when, so that no token is learnt from later than it may be.

A *group* is one prompt with all its samples. Groups are numbered in the order in which they are submitted to the generator,
batch `b` (counted from 0) is the groups `b * size … (b + 1) * size - 1`, and batches are learnt from in that order. The
learner's batch `b` therefore meets the policy that `b` batches made, whatever happened before.

The rule (AReaL, arXiv 2505.24298, section 5.1): a group may be submitted while the generator serves version `v` as long as

    submitted < (limit + v + 1) * size,         that is, capacity = (limit + v + 1) * size - (accepted + running) > 0.

The group's number is then below (limit + v + 1) * size, its batch at most limit + v, and a token drawn by version v or later
is at most `limit` versions old when it is learnt from. Nothing has to be dropped for its age, long responses least of all.

A version counts published policies here: one a batch, however many optimizer steps the batch is good for.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from adrl_jax.types import Rollout


class Ledger(NamedTuple):
    """The counters. Pure: every change is a new ledger.

    Attributes:
        limit: staleness limit, >= 0, in versions.
        size: groups of a batch, >= 1.
        submitted: groups handed to the generator since the run began (accepted and running together).
        consumed: batches learnt from, which is the learner's version.
        redone: groups generated once more under the same key, after a crash or because they were over age.
    """

    limit: int
    size: int
    submitted: int = 0
    consumed: int = 0
    redone: int = 0

    def capacity(self, version: int | None = None) -> int:
        """Groups that may be submitted while the generator serves `version` (the newest where None)."""
        version = self.consumed if version is None else version
        return max(0, (self.limit + version + 1) * self.size - self.submitted)

    def submit(self, count: int, version: int | None = None) -> "Ledger":
        """`count` more groups begin.

        Raises:
            ValueError: there is no capacity for them.
        """
        if not 0 <= count <= self.capacity(version):
            raise ValueError(f"{count} groups submitted, but there is capacity for {self.capacity(version)}")
        return self._replace(submitted=self.submitted + count)

    def consume(self) -> "Ledger":
        """A whole batch, the oldest, was learnt from.

        Raises:
            ValueError: it was never submitted.
        """
        if (self.consumed + 1) * self.size > self.submitted:
            raise ValueError(f"batch {self.consumed} is not complete: {self.submitted} groups of {self.size} a batch submitted")
        return self._replace(consumed=self.consumed + 1)

    def redo(self, count: int = 1) -> "Ledger":
        """Groups go back to the generator and keep their numbers, so nothing else changes."""
        return self._replace(redone=self.redone + count)

    def batch(self, group: int) -> int:
        """The batch that a group belongs to, counted from 0."""
        return group // self.size


def ledger(limit: int, size: int, *, consumed: int = 0) -> Ledger:
    """A ledger of a run that has learnt from `consumed` batches and has nothing under way.

    Raises:
        ValueError: limit < 0, size < 1 or consumed < 0.
    """
    for name, value, least in (("limit", limit, 0), ("size", size, 1), ("consumed", consumed, 0)):
        if value < least:
            raise ValueError(f"{name}={value!r} must be >= {least}")
    return Ledger(limit, size, consumed * size, consumed)


def ages(rollouts: Sequence[Rollout], version: int) -> np.ndarray:
    """Policy updates between drawing each response token and `version`, int `[tokens]`."""
    return np.concatenate([version - r.policy_versions for r in rollouts])


def check_bound(rollouts: Sequence[Rollout], version: int, most: int) -> None:
    """The promise, verified on what is about to be learnt from.

    Args:
        version: the learner's, in optimizer updates as in `Rollout.policy_versions`.
        most: oldest legal age in the same unit.

    Raises:
        RuntimeError: a token is older, or was drawn by a policy that does not exist yet.
    """
    found = ages(rollouts, version)
    if found.max() > most or found.min() < 0:
        raise RuntimeError(f"tokens are {found.min()} to {found.max()} updates old, outside [0, {most}]: a fault in admission")


def numbers(rollouts: Sequence[Rollout], version: int) -> dict[str, Any]:
    """`staleness/mean`, `/max` and `/hist` (share of tokens 0, 1, 2, … updates old) of what is about to be learnt from."""
    found = ages(rollouts, version)
    return {
        "staleness/mean": float(found.mean()),
        "staleness/max": float(found.max()),
        "staleness/hist": (np.bincount(np.maximum(found, 0)) / len(found)).tolist(),
    }


def over_age(groups: Iterable[tuple[int, Sequence[Rollout]]], book: Ledger, version: int, updates_per_batch: int) -> list[int]:
    """Which finished groups would be too old when their turn comes; none in normal running.

    Args:
        groups: (number, rollouts).
        version: the learner's now, in optimizer updates, after `book.consumed` batches.
        updates_per_batch: optimizer updates that one version stands for.
    """

    def age(number: int, rollouts: Sequence[Rollout]) -> int:
        until_then = (book.batch(number) - book.consumed) * updates_per_batch
        return version + until_then - min(int(r.policy_versions.min()) for r in rollouts)

    return [n for n, rollouts in groups if age(n, rollouts) > book.limit * updates_per_batch]
