"""Responses and groups within one row of targets, told apart by where their owner changes; all functions take `[U]`."""

import chex
import jax
import jax.numpy as jnp


def sequence_numbers(owner: jax.Array, mask: jax.Array) -> jax.Array:
    """Numbers the runs of equal `owner` in a row 0, 1, … in order of appearance, int32 `[U]`; padding joins the last one.

    A response lies in one row and its targets lie side by side, so a sequence begins where the owner changes. Groups are
    numbered the same way where packing keeps them together.
    """
    chex.assert_rank([owner, mask], 1)
    changes = (owner[1:] != owner[:-1]) & mask[1:]
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(changes, dtype=jnp.int32)])


def sums(values: jax.Array, owner: jax.Array, mask: jax.Array) -> jax.Array:
    """For each target the sum of `values` over the unmasked targets of its own sequence, float32 `[U]`."""
    chex.assert_equal_shape([values, owner, mask])
    numbers = sequence_numbers(owner, mask)
    return jax.ops.segment_sum(jnp.where(mask, values, 0.0).astype(jnp.float32), numbers, mask.shape[0])[numbers]


def sequence_lengths(owner: jax.Array, mask: jax.Array) -> jax.Array:
    """For each target the number of unmasked targets of its sequence, float32 `[U]`, at least 1."""
    return jnp.maximum(sums(mask.astype(jnp.float32), owner, mask), 1.0)


def means(values: jax.Array, owner: jax.Array, mask: jax.Array) -> jax.Array:
    """For each target the mean of `values` over its own sequence, float32 `[U]`."""
    return sums(values, owner, mask) / sequence_lengths(owner, mask)


def first_of(owner: jax.Array, mask: jax.Array) -> jax.Array:
    """Whether a target is the first of its sequence, bool `[U]`; never at padding. A sum over these counts sequences."""
    numbers = sequence_numbers(owner, mask)
    fresh = jnp.concatenate([jnp.ones(1, bool), numbers[1:] != numbers[:-1]])
    return fresh & mask
