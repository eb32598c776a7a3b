"""A TPU kernel's grid and blocks as data: the same description builds the call and counts the bytes it moves.

A block is copied between HBM and VMEM when its index differs from the one of the grid step before; that is what
`pl.pallas_call` does on a TPU, and what `Plan.traffic` counts.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True)
class Operand:
    """One array of a call.

    Attributes:
        name: for the table of bytes.
        shape, dtype: of the whole array.
        block: block sizes, None for a dimension of size 1 that the kernel does not see.
        index: `(*grid indices, *scalar arrays) -> block indices`; plain indexing and integer arithmetic only, since it is also run
            on NumPy values.
        partial: the call reads parts of the array only. Such an array stays in HBM; others XLA may bring into VMEM as a whole
            before the call, where there is room.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    block: tuple[int | None, ...]
    index: Callable[..., tuple[Any, ...]]
    partial: bool = False

    @property
    def spec(self) -> pl.BlockSpec:
        return pl.BlockSpec(self.block, self.index)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def block_bytes(self, index: tuple[int, ...]) -> int:
        """Bytes of the block at `index`, without what lies past the array's end."""
        sizes = [min(b or 1, s - i * (b or 1)) for b, s, i in zip(self.block, self.shape, index)]
        if min(sizes) < 1:
            raise ValueError(f"block {index} of {self.name} lies outside of its array {self.shape}")
        return math.prod(sizes) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Plan:
    """A call. Scalar arrays come first among its arguments and live in SMEM.

    Attributes:
        grid: steps of each dimension; the last runs fastest.
        semantics: `parallel` or `arbitrary` of each dimension.
        inputs, outputs: in order.
        scratch: VMEM arrays that live as long as the call.
        aliases: input number (without scalars) -> output number that shares its buffer.
        vmem_limit: bytes that the compiler may use, None for its default.
    """

    grid: tuple[int, ...]
    semantics: tuple[str, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    scratch: tuple[Any, ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()
    vmem_limit: int | None = None

    def call(self, kernel: Callable, scalars: Sequence[jax.Array], arrays: Sequence[jax.Array], *, name: str, interpret: Any):
        """Runs `kernel(*scalar refs, *input refs, *output refs, *scratch refs)` over the grid; returns a list of outputs."""
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=self.grid,
            in_specs=[x.spec for x in self.inputs],
            out_specs=[x.spec for x in self.outputs],
            scratch_shapes=list(self.scratch),
        )
        if interpret is False:
            arrays = [
                pltpu.with_memory_space_constraint(x, pltpu.HBM) if operand.partial else x
                for operand, x in zip(self.inputs, arrays, strict=True)
            ]
        return pl.pallas_call(
            kernel,
            grid_spec=spec,
            out_shape=[x.struct for x in self.outputs],
            input_output_aliases={i + len(scalars): o for i, o in self.aliases},
            interpret=interpret,
            name=name,
            compiler_params=pltpu.CompilerParams(dimension_semantics=self.semantics, vmem_limit_bytes=self.vmem_limit),
        )(*scalars, *arrays)

    def traffic(self, *scalars: np.ndarray) -> dict[str, int]:
        """HBM bytes of each operand for these scalar arrays: blocks read, and blocks written."""
        steps = list(itertools.product(*(range(n) for n in self.grid)))
        found: dict[str, int] = {}
        for operand in (*self.inputs, *self.outputs):
            total, before = 0, None
            for step in steps:
                index = tuple(int(i) for i in operand.index(*step, *scalars))
                if index != before:
                    total += operand.block_bytes(index)
                before = index
            found[operand.name] = found.get(operand.name, 0) + total
        for scalar in scalars:
            found["scalars"] = found.get("scalars", 0) + np.asarray(scalar).nbytes
        return found


def forward_filled(live: jax.Array, *values: jax.Array) -> tuple[jax.Array, ...]:
    """Each of `values` `[T, …]` with dead entries replaced by the last live one before (the first live one at the start).

    A block whose index does not change is not fetched again: so dead steps of a grid cost no traffic. Works on NumPy arrays
    and on JAX arrays. Where nothing lives at all, everything is the first entry's value.

    Args:
        live: bool `[T, M]`.
        values: `[T, M]` each.
    """
    xp = np if isinstance(live, np.ndarray) else jnp
    places = xp.arange(live.shape[0], dtype=xp.int32)[:, None]
    marked = xp.where(live, places, -1)
    last = np.maximum.accumulate(marked, axis=0) if xp is np else jax.lax.cummax(marked, axis=0)
    at = xp.where(last >= 0, last, xp.argmax(live, axis=0).astype(xp.int32)[None])
    return tuple(xp.take_along_axis(v, at, axis=0) for v in values)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return cdiv(a, b) * b
