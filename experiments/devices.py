"""Which devices generate and which learn."""

from typing import Any

import jax

from adrl_jax.learner.update import AXIS
from experiments.schema import require

OVERLAPPED = ("overlap", "in_flight")


def check(c: Any) -> None:
    """Rules between the device fields that need no look at the machine.

    Raises:
        ConfigError: names the field, its value and what would be legal.
    """
    r, count = c.runtime, c.learner.devices
    generator, learner = r.generator_devices, r.learner_devices
    require(not learner or len(learner) == count, "runtime.learner_devices", learner, f"learner.devices={count} of them, or ()")
    require(len(set(learner)) == len(learner), "runtime.learner_devices", learner, "each device once")
    require(len(generator) <= 1, "runtime.generator_devices", generator, "one device: an engine runs on one")
    both = sorted(set(generator) & set(learner or range(count)))
    require(
        r.mode not in OVERLAPPED or not both,
        "runtime.generator_devices",
        generator,
        f"runtime.mode={r.mode} needs groups that share no device; device {both[0] if both else ''} learns already "
        f"(runtime.learner_devices={learner or tuple(range(count))})",
    )
    require(
        r.mode in OVERLAPPED or not generator,
        "runtime.generator_devices",
        generator,
        f"runtime.mode={r.mode} generates where it learns; leave it empty, or set mode to one of {', '.join(OVERLAPPED)}",
    )


def groups(c: Any) -> tuple[list[jax.Device], jax.Device | None]:
    """The learner's devices, and the generator's where it has its own.

    Raises:
        ConfigError: a device does not exist, or there are too few.
    """
    r, here = c.runtime, jax.devices()
    numbers = r.learner_devices or tuple(range(c.learner.devices))
    there = f"jax.devices() here are 0 to {len(here) - 1}: {', '.join(str(d) for d in here)}"
    field, value = ("runtime.learner_devices", numbers) if r.learner_devices else ("learner.devices", c.learner.devices)
    require(max(numbers) < len(here), field, value, f"at most {len(here)} here: {there}")
    learner = [here[i] for i in numbers]
    if r.mode not in OVERLAPPED:
        return learner, None
    free = [i for i in range(len(here)) if i not in numbers]
    chosen = r.generator_devices or tuple(free[:1])
    hint = "on CPU set XLA_FLAGS=--xla_force_host_platform_device_count=2"
    require(
        bool(chosen),
        "runtime.mode",
        r.mode,
        f"it needs a device to generate on beside the {len(learner)} that learn, but {there}; sync and lagged need one only ({hint})",
    )
    require(chosen[0] < len(here), "runtime.generator_devices", chosen, there)
    return learner, here[chosen[0]]


def mesh(devices: list[jax.Device]) -> jax.sharding.Mesh:
    """The learner's devices along its one axis."""
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
