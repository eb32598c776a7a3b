"""Tasks by name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from adrl_jax.tasks.arithmetic import Arithmetic
from adrl_jax.tasks.base import Task
from adrl_jax.tasks.division import Division
from adrl_jax.tasks.gsm8k import Gsm8k

TASKS: Mapping[str, Callable[..., Task]] = {"arithmetic": Arithmetic, "division": Division, "gsm8k": Gsm8k}


def build(name: str, **options: Any) -> Task:
    """The task `name` with `options` as its fields.

    Raises:
        ValueError: unknown task, unknown option, or an option out of range.
    """
    if name not in TASKS:
        raise ValueError(f"task={name!r} is unknown; choose one of {', '.join(sorted(TASKS))}")
    legal = [p for p in inspect.signature(TASKS[name]).parameters if p != "tokenizer"]
    for option in options:
        if option not in legal:
            raise ValueError(f"task {name!r} has no option {option!r}; choose from {', '.join(legal)}")
    return TASKS[name](**options)
