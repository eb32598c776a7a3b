"""Accelerators that kernels are compiled for on machines that have none, and what these chips can do.

Compiling needs the package `libtpu`, no TPU. Peaks are the makers' published figures: HBM bandwidth and dense matrix products.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip.

    Attributes:
        name: as in tables.
        topology: what libtpu calls the smallest slice.
        bandwidth: bytes a second between HBM and the chip.
        flops: bfloat16 operations a second.
    """

    name: str
    topology: str
    bandwidth: float
    flops: float

    def seconds(self, moved: float, operations: float) -> float:
        """Roofline: the longer of moving the bytes and doing the operations."""
        return max(moved / self.bandwidth, operations / self.flops)


# The v7x is published as 7.4 TB/s and 2,307 TFLOP/s (bfloat16) a chip; a JAX device is one of its two cores.
CHIPS = (
    Chip("v5e", "v5e:2x2", 819e9, 197e12),
    Chip("v5p", "v5p:2x2x1", 2765e9, 459e12),
    Chip("v6e", "v6e:2x2", 1640e9, 918e12),
    Chip("v7x", "tpu7x:2x2x1", 7380e9 / 2, 2307e12 / 2),
)


def missing() -> str | None:
    """Why nothing can be compiled for a TPU here, None where it can."""
    return None if importlib.util.find_spec("libtpu") else "the package libtpu is not installed"


@functools.cache
def _mesh(topology: str) -> jax.sharding.Mesh:
    if jax.default_backend() != "tpu":
        # Else libtpu asks a cloud's metadata server, which is not there, what machine this is, and lets one process compile.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return jax.sharding.Mesh(np.array(devices[:1]), ("x",))


def compiled(chip: Chip, function: Callable, *args: Any, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """`function` compiled for `chip`; leaves of `args` are arrays or `jax.ShapeDtypeStruct`s, only shapes count."""
    mesh = _mesh(chip.topology)
    sharding = jax.NamedSharding(mesh, jax.P())
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with _quiet(mesh):
        return jax.jit(function, donate_argnums=donate).lower(*structs).compile()


@contextlib.contextmanager
def _quiet(mesh: jax.sharding.Mesh):
    # Kernels that ask which TPU they run on look at the abstract mesh.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield
