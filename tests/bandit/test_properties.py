"""What every bandit must do, whatever its rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.bandit.beg import beg
from adrl_jax.bandit.fixed import fixed


@dataclasses.dataclass(frozen=True)
class Arm:
    depth: int
    verify_tokens: int | None = None


ARMS = (Arm(0), Arm(7), Arm(7), Arm(3), Arm(1))
MAKERS = {
    "fixed": lambda: fixed(2, len(ARMS)),
    "beg": lambda: beg(ARMS, (1, 4, 16), epsilon=0.3, window=20),
    "beg-aged": lambda: beg(ARMS, (1, 4, 16), epsilon=0.3, window=20, max_age=30),
}


@pytest.fixture(params=MAKERS)
def bandit(request):
    return MAKERS[request.param]()


def drive(bandit, state, start, rounds, speed):
    """Runs launches `start …` with keys folded from the launch number; returns the state and the picks."""
    picks = []
    for launch in range(start, start + rounds):
        running = 1 + launch * 7 % 40
        arm = int(bandit.select(state, jax.random.fold_in(jax.random.key(3), launch), running))
        state = bandit.update(state, arm, running, 64, 64 / speed(arm, running))
        picks.append(arm)
    return state, picks


def speed(arm, running):
    return 100.0 + 10 * arm + running


def test_picks_are_int32_scalars_in_range(bandit):
    state = bandit.init()
    for running in (1, 3, 4, 15, 16, 1000):
        arm = bandit.select(state, jax.random.key(0), running)
        assert arm.dtype == jnp.int32 and arm.shape == () and 0 <= int(arm) < len(ARMS)


def test_state_is_arrays_of_constant_shape(bandit):
    before = bandit.init()
    after, _ = drive(bandit, before, 0, 30, speed)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.isfinite(np.asarray(b)).all()


def test_functions_do_not_change_their_arguments(bandit):
    state, _ = drive(bandit, bandit.init(), 0, 5, speed)
    copy = jax.tree.map(np.array, state)
    bandit.update(state, 0, 1, 10, 1.0)
    bandit.select(state, jax.random.key(0), 1)
    jax.tree.map(np.testing.assert_array_equal, copy, jax.tree.map(np.array, state))


def test_saved_and_restored_state_gives_the_same_next_50_picks(bandit):
    state, _ = drive(bandit, bandit.init(), 0, 60, speed)
    saved = [np.array(x) for x in jax.tree.leaves(state)]
    _, expected = drive(bandit, state, 60, 50, speed)
    restored = jax.tree.unflatten(jax.tree.structure(state), [jnp.asarray(x) for x in saved])
    _, picks = drive(bandit, restored, 60, 50, speed)
    assert picks == expected


def test_works_inside_jit(bandit):
    @jax.jit
    def launch(state, key, running):
        arm = bandit.select(state, key, running)
        return bandit.update(state, arm, running, 10.0, 2.0), arm

    state = bandit.init()
    inside, arm = launch(state, jax.random.key(1), 5)
    assert int(arm) == int(bandit.select(state, jax.random.key(1), 5))
    outside = bandit.update(state, arm, 5, 10.0, 2.0)
    jax.tree.map(np.testing.assert_array_equal, inside, outside)


@pytest.mark.parametrize("running", [0, -1])
def test_no_running_request_is_an_error(bandit, running):
    with pytest.raises(ValueError, match=f"running={running}"):
        bandit.select(bandit.init(), jax.random.key(0), running)
    with pytest.raises(ValueError, match=f"running={running}"):
        bandit.update(bandit.init(), 0, running, 1, 1.0)


@pytest.mark.parametrize(
    "arguments, name",
    [((5, 1, 1, 1.0), "arm=5"), ((-1, 1, 1, 1.0), "arm=-1"), ((0, 1, -2, 1.0), "tokens=-2")]
    + [((0, 1, 1, seconds), "seconds=") for seconds in (0.0, -1.0, float("nan"), float("inf"))],
)
def test_senseless_reports_are_errors(bandit, arguments, name):
    with pytest.raises(ValueError, match=name):
        bandit.update(bandit.init(), *arguments)


@pytest.mark.parametrize("maker", [name for name in MAKERS if name != "fixed"])
def test_off_holds_nine_of_ten_picks_where_speculation_is_slow(maker):
    """Batch 64: plain 1.0 s a token-round; depth 4 costs 3.0 s and yields 2.0 tokens."""
    bandit = beg((Arm(4), Arm(0)), (1,), epsilon=0.1, window=100, max_age=100 if maker == "beg-aged" else None)
    state, picks = bandit.init(), []
    for launch in range(400):
        arm = int(bandit.select(state, jax.random.fold_in(jax.random.key(0), launch), 64))
        state = bandit.update(state, arm, 64, *((128, 3.0) if arm == 0 else (64, 1.0)))
        picks.append(arm)
    assert np.mean(np.asarray(picks[20:]) == 1) > 0.9
