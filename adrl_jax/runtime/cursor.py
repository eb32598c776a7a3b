"""Which prompts come next, as a small state that is saved with the weights.

Every epoch shuffles all prompts anew and draws each exactly once. The order is part of the state, so a resumed run goes on
with the same prompts even where another library version would shuffle otherwise. A *visit* counts how often a prompt was
drawn before; it names the randomness of the new responses.

`N` prompts.
"""

from typing import NamedTuple

import numpy as np


class CursorState(NamedTuple):
    """Attributes:
    seed: int64 `[]`, of the run.
    epoch: int32 `[]`, counts from 0.
    index: int32 `[]`, how many prompts of this epoch were drawn, in [0, N).
    order: int32 `[N]`, this epoch's order.
    visits: int32 `[N]`, how often each prompt was drawn so far.
    """

    seed: np.ndarray
    epoch: np.ndarray
    index: np.ndarray
    order: np.ndarray
    visits: np.ndarray


def init(seed: int, size: int) -> CursorState:
    """Before the first draw from `size` prompts.

    Raises:
        ValueError: `size` < 1 or `seed` < 0.
    """
    if size < 1:
        raise ValueError(f"size={size!r} must be >= 1: there are no prompts to draw")
    if seed < 0:
        raise ValueError(f"seed={seed!r} must be >= 0")
    return CursorState(np.int64(seed), np.int32(0), np.int32(0), shuffled(seed, 0, size), np.zeros(size, np.int32))


def shuffled(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order of an epoch, int32 `[size]`, named by seed and epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(size).astype(np.int32)


def draw(state: CursorState, count: int) -> tuple[np.ndarray, np.ndarray, CursorState]:
    """The next `count` prompts, across epoch ends where need be; `state` itself is not changed.

    Returns:
        prompt indices and their visit numbers, int32 `[count]` each, and the state after them.

    Raises:
        ValueError: `count` < 1.
    """
    if count < 1:
        raise ValueError(f"count={count!r} must be >= 1")
    epoch, index, order, visits = int(state.epoch), int(state.index), state.order, state.visits.copy()
    prompts, numbers = np.empty(count, np.int32), np.empty(count, np.int32)
    for i in range(count):
        prompts[i] = order[index]
        numbers[i] = visits[order[index]]
        visits[order[index]] += 1
        index += 1
        if index == len(order):
            epoch, index = epoch + 1, 0
            order = shuffled(int(state.seed), epoch, len(order))
    return prompts, numbers, CursorState(state.seed, np.int32(epoch), np.int32(index), order, visits)
