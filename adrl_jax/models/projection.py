"""Products with weights stored `[out, in]`, the layout in which an engine serves large ones.

Decoding multiplies a few rows by every weight of the model: a product bound by reading the weights once. XLA's CPU product
first copies ("packs") both of its operands, the right one at a greater cost, so that with 4 to 64 rows `W @ x.T` takes a
fifth to a quarter less time than `x @ W.T` or `x @ W`, and no more with one row. XLA takes the transposition apart
again unless it is told not to, hence the barriers.
"""

import jax
import jax.numpy as jnp

# Where the measured advantage ends: up to so many rows, and so many elements of a result that is transposed back (12 MB).
_FEW_ROWS = 128
_FEW_RESULTS = 3 * 2**20

# More rows than `_ALONE` are padded to multiples of `_TOGETHER`, which is faster.
_ALONE, _TOGETHER = 4, 8

_LARGE = 2**17
"""Elements from which a weight is stored `[out, in]`: smaller ones stay in cache, where transposing costs more than it saves."""


def is_large(kernel: jax.Array) -> bool:
    """Whether a weight matrix gains by the layout `[out, in]`."""
    return kernel.ndim == 2 and kernel.size >= _LARGE


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T`.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`, cast to the dtype of `x`.

    Returns:
        `[..., out]` in the dtype of `x`.
    """
    weight = weight.astype(x.dtype)
    flat = x.reshape(-1, x.shape[-1])
    rows, out = flat.shape[0], weight.shape[0]
    if rows <= _FEW_ROWS and rows * out <= _FEW_RESULTS:
        y = jax.lax.platform_dependent(flat, weight, cpu=_weight_first, default=_rows_first)
    else:
        y = _rows_first(flat, weight)
    return y.reshape(*x.shape[:-1], out)


def _rows_first(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


def _weight_first(x: jax.Array, weight: jax.Array) -> jax.Array:
    rows = x.shape[0]
    # The product works on eight columns at a time and is slow with a rest: 7 rows take a fifth longer than 8.
    padded = x if rows <= _ALONE else jnp.pad(x, ((0, -rows % _TOGETHER), (0, 0)))
    columns = jax.lax.optimization_barrier(padded.T)
    return jax.lax.optimization_barrier(jnp.dot(weight, columns)).T[:rows]
