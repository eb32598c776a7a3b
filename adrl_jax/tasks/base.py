"""What a task is: prompts by split, and a score for a response."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, overload

import numpy as np

from adrl_jax.types import Prompt, Score


class TextCodec(Protocol):
    """The part of a tokenizer that tasks use; `adrl_jax.models.tokenizer` has the implementations."""

    def encode(self, text: str, add_bos: bool = False) -> np.ndarray: ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    def chat(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str: ...


class Task(Protocol):
    """A source of questions with a scorer. Implementations are frozen dataclasses.

    Attributes:
        name: as in the registry.
        splits: names that `prompts` accepts.
    """

    name: str
    splits: tuple[str, ...]

    def encode(self, tokenizer: TextCodec) -> "Task":
        """The same task with prompts encoded by `tokenizer`. Must precede `prompts`."""
        ...

    def prompts(self, split: str) -> "Prompts":
        """The prompts of a split; prompt i has `prompt_id == i` and is always the same.

        Raises:
            ValueError: the split is unknown, or `encode` was not called.
        """
        ...

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """Judges one response.

        Args:
            prompt: as `prompts` gave it.
            response_text: the decoded response, special tokens left out.
            truncated: the response did not end by itself.
        """
        ...


class Prompts(Sequence[Prompt]):
    """A fixed number of prompts, each made when it is asked for.

    Args:
        size: how many there are.
        make: `index -> Prompt`; must depend on nothing but the index.
    """

    def __init__(self, size: int, make: Callable[[int], Prompt]):
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        index = int(index)
        if not -self._size <= index < self._size:
            raise IndexError(f"prompt {index} does not exist; there are {self._size}")
        return self._make(index % self._size)


def check_split(task: Task, split: str) -> None:
    """Raises ValueError when `task` has no such split."""
    if split not in task.splits:
        raise ValueError(f"split={split!r} is unknown to task {task.name!r}; choose one of {', '.join(task.splits)}")


def encoded(task: Any, text: str) -> np.ndarray:
    """`text` in the ids of the task's tokenizer, int32 `[P]`.

    Raises:
        ValueError: `encode` was not called.
    """
    if task.tokenizer is None:
        raise ValueError(f"task {task.name!r} has no tokenizer yet: call task.encode(tokenizer) before task.prompts(split)")
    return np.asarray(task.tokenizer.encode(text), np.int32)


def positive(owner: str, **values: int) -> None:
    """Raises ValueError for the first of `values` that is not a positive integer."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{owner}.{name}={value!r} must be a positive integer")
