"""Counting bytes: a block moves when its index changes, and only as much of it as lies in the array."""

import jax.numpy as jnp
import numpy as np
import pytest
from adrl_kernels.plan import Operand, Plan, forward_filled


def plan(*operands, grid):
    return Plan(grid, ("arbitrary",) * len(grid), operands[:-1], operands[-1:])


def test_blocks_count_when_their_index_changes():
    # A product [8, 32] x [32, 24] in blocks of rows and columns: the right factor is read once for each block of rows.
    left = Operand("left", (8, 32), jnp.float32, (4, 32), lambda i, j: (i, 0))
    right = Operand("right", (32, 24), jnp.bfloat16, (32, 8), lambda i, j: (0, j))
    out = Operand("out", (8, 24), jnp.float32, (4, 8), lambda i, j: (i, j))
    moved = plan(left, right, out, grid=(2, 3)).traffic()
    assert moved == {"left": 8 * 32 * 4, "right": 2 * 32 * 24 * 2, "out": 8 * 24 * 4}


def test_the_end_of_an_array_ends_its_last_block():
    x = Operand("x", (3, 10), jnp.int8, (None, 4), lambda i: (1, i))
    assert plan(x, grid=(3,)).traffic() == {"x": 10}
    with pytest.raises(ValueError, match=r"block \(1, 3\) of x lies outside"):
        plan(x, grid=(4,)).traffic()


def test_scalar_arrays_steer_blocks_and_are_counted():
    x = Operand("x", (9, 4), jnp.float32, (None, 4), lambda i, place: (place[i], 0))
    places = np.array([3, 3, 3, 8, 3], np.int32)
    assert plan(x, grid=(5,)).traffic(places) == {"x": 3 * 16, "scalars": 20}


def test_dead_entries_repeat_the_last_live_one():
    live = np.array([[0, 0], [1, 0], [0, 0], [1, 0], [0, 0]], bool)
    values = np.arange(10, dtype=np.int32).reshape(5, 2)
    (filled,) = forward_filled(live, values)
    np.testing.assert_array_equal(filled[:, 0], [2, 2, 2, 6, 6])
    np.testing.assert_array_equal(filled[:, 1], 1)  # nothing lives: the first
    np.testing.assert_array_equal(forward_filled(jnp.asarray(live), jnp.asarray(values))[0], filled)
