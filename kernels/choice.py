"""Which implementation of an operation runs, and the errors for what none of them can do."""

import functools
import importlib
import logging
import types
from collections.abc import Callable

import jax

IMPLEMENTATIONS = ("auto", "xla", "pallas_tpu", "pallas_gpu", "interpret")
"""What settings may name. `interpret` runs the TPU kernel as plain XLA operations on any backend: slow, for tests."""

_PLATFORM = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}


class UnsupportedError(ValueError):
    """A kernel cannot do what was asked; the message names the argument, its value and what is supported."""


def check_name(implementation: str, field: str = "implementation") -> None:
    """Raises ValueError for a name that is not one of `IMPLEMENTATIONS`."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{field}={implementation!r} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}")


def check_platform(implementation: str, field: str = "implementation") -> None:
    """Raises ValueError where a program that runs on this machine cannot use `implementation`.

    The operations themselves do not ask: a program may be lowered for a machine that is not here.
    """
    check_name(implementation, field)
    needed, here = _PLATFORM.get(implementation), jax.default_backend()
    if needed is not None and needed != here:
        raise ValueError(
            f"{field}={implementation!r} needs a {needed.upper()}, and JAX runs on {here}; choose auto, xla, or (slow) interpret"
        )


def resolve(operation: str, implementation: str, problem: Callable[[str], str | None]) -> str:
    """The implementation that runs: `implementation` itself, or what `auto` stands for here, logged once with the reason.

    Args:
        operation: its name, for messages.
        problem: what keeps an implementation from doing the call, None where nothing does.

    Raises:
        ValueError: the name is unknown.
        UnsupportedError: the named implementation cannot do the call.
    """
    check_name(implementation)
    if implementation != "auto":
        found = problem(implementation)
        if found is not None:
            raise UnsupportedError(f"{operation} by {implementation}: {found}")
        return implementation
    platform = jax.default_backend()
    if platform == "gpu":
        return told(operation, "xla", "the Pallas kernels for GPUs have not been measured on one yet")
    if platform != "tpu":
        return told(operation, "xla", f"there are no Pallas kernels for {platform}")
    found = problem("pallas_tpu")
    if found is not None:
        return told(operation, "xla", f"pallas_tpu cannot: {found}")
    return told(operation, "pallas_tpu", "the backend is a TPU")


def gpu_module(operation: str) -> types.ModuleType:
    """The operation's kernels for GPUs. Imported only where somebody asks for them: not every jaxlib has Mosaic GPU."""
    return importlib.import_module(f"adrl_kernels.{operation}.pallas_gpu")


@functools.cache
def told(operation: str, implementation: str, reason: str) -> str:
    """`implementation`, logged with the reason the first time."""
    logging.getLogger("adrl_kernels").info("%s runs on %s: %s", operation, implementation, reason)
    return implementation
