"""Small helpers of the Mosaic GPU kernels: register layouts, which interpreters on CPUs do not know."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Rows of one tensor-core product by one group of threads."""

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""How two-byte operands of tensor-core products lie in shared memory."""

MATRIX = plgpu.Layout.WGMMA
COLUMN = plgpu.Layout.WGMMA.reduce(1)

# jax 0.10 wants an index beside the reference, which later versions do without.
_WHOLE = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()


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


def column(ref, interpreted: bool) -> jax.Array:
    """One number a row from shared memory, as sums along a product's rows lie."""
    return ref[...] if interpreted else plgpu.load(ref, *_WHOLE, layout=COLUMN)


def gumbel(random_bits: jax.Array) -> jax.Array:
    """`noise.gumbel_in_kernel` without `log1p`, which Mosaic GPU lacks.

    log1p(x) = x log(w) / (w - 1) with w = 1 + x, where w is not 1 (Kahan; Higham 2002, section 1.14.1): the errors of w cancel.
    """
    high = (random_bits >> np.uint32(16)).astype(jnp.int32).astype(jnp.float32)
    low = (random_bits & np.uint32(0xFFFF)).astype(jnp.int32).astype(jnp.float32)
    u = (high * jnp.float32(65536.0) + low) * jnp.float32(2.0**-32) + jnp.float32(2.0**-33)
    u = jnp.minimum(u, jnp.float32(1.0 - 2.0**-24))
    w = 1.0 - u
    near = w == 1.0
    exponential = jnp.where(near, u, -u * jnp.log(w) / jnp.where(near, 1.0, 1.0 - w))
    return -jnp.log(exponential)
