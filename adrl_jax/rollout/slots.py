"""The host's mirror of the rows on the device, as of the last launch. Numpy, one entry a row."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from adrl_jax.speculation.strategy import Strategy
from adrl_jax.types import Request


@dataclasses.dataclass
class Slots:
    """Which request each row serves, and how far it is.

    Attributes:
        request: index of the request, -1 for rows that serve none (any more).
        length, limit: tokens known, and the length at which the budget ends.
        running: not finished.
        passes, committed: `accept_passes` and `accept_tokens` of `RolloutState`.
        behind: more has been answered to the row's prompt than its references hold.
    """

    request: np.ndarray
    length: np.ndarray
    limit: np.ndarray
    running: np.ndarray
    passes: np.ndarray
    committed: np.ndarray
    behind: np.ndarray

    @classmethod
    def empty(cls, batch: int) -> "Slots":
        """Rows that serve nothing."""
        ones, zeros = np.ones(batch, np.int32), np.zeros(batch, np.int32)
        return cls(np.full(batch, -1), ones, ones.copy(), np.zeros(batch, bool), zeros, zeros.copy(), np.zeros(batch, bool))

    def __len__(self) -> int:
        return len(self.request)

    def grown(self, batch: int) -> "Slots":
        """These rows, and free ones up to `batch`."""
        extra = Slots.empty(batch - len(self))
        names = [f.name for f in dataclasses.fields(self)]
        return Slots(*(np.concatenate([getattr(self, n), getattr(extra, n)]) for n in names))

    def take(self, rows: np.ndarray) -> "Slots":
        return Slots(*(getattr(self, f.name)[rows] for f in dataclasses.fields(self)))

    def put(self, rows: Sequence[int], indices: Sequence[int], requests: Sequence[Request], lengths: Sequence[int]) -> None:
        """Gives the free `rows` to the requests at `indices`, of which `lengths` tokens are known."""
        self.request[rows] = indices
        self.length[rows] = lengths
        self.limit[rows] = [len(requests[i].prompt.token_ids) + requests[i].max_new_tokens for i in indices]
        self.running[rows] = self.behind[rows] = True
        self.passes[rows] = self.committed[rows] = 0

    def needed(self, strategy: Strategy, launch_rounds: int) -> int:
        """The capacity at which no write of a launch passes the end of a running row.

        A round writes `depth + 1` entries from the last known token on (of a tree, its path). A row that finishes within the
        launch stays at most at its limit.
        """
        width = strategy.depth + 1
        last_start = np.minimum(self.limit - 1, self.length + (launch_rounds - 1) * width)
        return int(np.max(np.where(self.running, last_start, 1))) + width
