"""Rematerialisation that the compiler cannot undo.

`jax.checkpoint` marks what is to be computed again with optimization barriers. XLA on CPU drops those before it merges equal
expressions, finds the "second" computation equal to the first and keeps everything after all. Here the second computation
starts from inputs times a number that is always 1 but only known at run time, so it is never equal to the first.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def runtime_one(witness: jax.Array) -> jax.Array:
    """A scalar 1 in the dtype of `witness` that the compiler cannot know (2 where its first element is NaN: all is lost)."""
    return jnp.where(jnp.isnan(witness[(0,) * witness.ndim]), 2, 1).astype(witness.dtype)


def recomputed(layer: Callable) -> Callable:
    """`layer(weights, x, rest) -> y` with the same value and gradient that keeps only its arguments for the backward pass."""

    @jax.custom_vjp
    def run(weights, x, rest):
        return layer(weights, x, rest)

    def forward(weights, x, rest):
        return layer(weights, x, rest), (weights, x, rest)

    def backward(saved, cotangent):
        weights, x, rest = saved
        one = runtime_one(cotangent)
        # Vectors too: spread over all tokens (a norm's weights), they would be kept from the first computation to the second.
        weights = jax.tree.map(lambda w: w * one.astype(w.dtype) if w.ndim == 1 else w, weights)
        return jax.vjp(layer, weights, x * one, rest)[1](cotangent)

    run.defvjp(forward, backward)
    return run
