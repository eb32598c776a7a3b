"""Small helpers of the Mosaic GPU kernels: register layouts, which interpreters on CPUs do not know."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Rows of one tensor-core product by one group of threads."""

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""How two-byte operands of tensor-core products lie in shared memory."""

MATRIX = plgpu.Layout.WGMMA
COLUMN = plgpu.Layout.WGMMA.reduce(1)


def full(shape: tuple[int, ...], value: float, layout, interpreted: bool) -> jax.Array:
    """A float32 constant in registers."""
    out = jnp.full(shape, value, jnp.float32)
    return out if interpreted else plgpu.layout_cast(out, layout)


def iota(shape: tuple[int, int], axis: int, interpreted: bool) -> jax.Array:
    """int32 indices along an axis, as a product's result lies."""
    if interpreted:
        return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX)


def across(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """One number a row, along the row."""
    return jax.lax.broadcast_in_dim(x, shape, [0])
