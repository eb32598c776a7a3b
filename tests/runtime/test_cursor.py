"""The prompt cursor: each prompt once an epoch, and the same order whoever looks and whenever it stops."""

import numpy as np
import pytest

from adrl_jax.runtime import cursor


def take(state, counts):
    drawn = []
    for count in counts:
        prompts, visits, state = cursor.draw(state, count)
        drawn += list(zip(prompts.tolist(), visits.tolist()))
    return drawn, state


def test_every_epoch_draws_each_prompt_once_in_another_order():
    drawn, _ = take(cursor.init(3, 10), [4] * 5)
    first, second = drawn[:10], drawn[10:]
    assert sorted(p for p, _ in first) == sorted(p for p, _ in second) == list(range(10))
    assert [p for p, _ in first] != [p for p, _ in second]
    assert {v for _, v in first} == {0} and {v for _, v in second} == {1}


@pytest.mark.parametrize("stop", range(9))
def test_going_on_from_a_saved_state_is_the_unbroken_run(stop):
    counts = [3, 4, 1, 5, 2, 7, 3, 2]
    whole, end = take(cursor.init(7, 11), counts)
    before, saved = take(cursor.init(7, 11), counts[:stop])
    restored = cursor.CursorState(*(np.array(x, copy=True) for x in saved))
    after, end_again = take(restored, counts[stop:])
    assert before + after == whole
    for a, b in zip(end, end_again):
        np.testing.assert_array_equal(a, b)


def test_an_epoch_that_ends_with_the_draw_is_not_skipped():
    drawn, state = take(cursor.init(0, 8), [8])
    assert int(state.epoch) == 1 and int(state.index) == 0
    more, _ = take(state, [8])
    assert sorted(p for p, _ in more) == list(range(8)) and {v for _, v in more} == {1}
    assert {v for _, v in drawn} == {0}


def test_draw_leaves_its_argument_alone_and_seeds_differ():
    state = cursor.init(1, 50)
    a, _, _ = cursor.draw(state, 30)
    b, _, _ = cursor.draw(state, 30)
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(state.order, cursor.init(2, 50).order)
    assert state.visits.sum() == 0


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="size=0"):
        cursor.init(0, 0)
    with pytest.raises(ValueError, match="seed=-1"):
        cursor.init(-1, 3)
    with pytest.raises(ValueError, match="count=0"):
        cursor.draw(cursor.init(0, 3), 0)
