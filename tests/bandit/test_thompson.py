import jax
import numpy as np
from launches import context, report

from adrl_jax.bandit.thompson import thompson
from adrl_jax.speculation.strategy import OFF, Strategy

ARMS = (OFF, Strategy("eagle", 4))


def test_statistics_are_the_discounted_ones():
    bandit, rng = thompson(ARMS, (4,), discount=0.9), np.random.default_rng(1)
    state, rewards = bandit.init(), rng.uniform(1, 3, 30)
    arms = rng.integers(0, 2, 30)
    for arm, value in zip(arms, rewards):
        state = bandit.update(state, report(int(arm), 2, 2 * value, 1.0, batch=4))
    weights = 0.9 ** np.arange(29, -1, -1)
    for arm in range(2):
        mine = weights * (arms == arm)
        np.testing.assert_allclose(state.count[0, arm], mine.sum(), rtol=1e-5)
        # A running mean with the arm's own discounted count as its weight is the discounted mean.
        np.testing.assert_allclose(state.mean[0, arm], (mine * rewards).sum() / mine.sum(), rtol=1e-5)
        np.testing.assert_allclose(state.square[0, arm], (mine * rewards**2).sum() / mine.sum(), rtol=1e-5)


def test_picks_an_arm_as_often_as_its_draw_is_the_largest():
    """Two arms with equal spread whose means lie one deviation of the difference apart: 0.84 to 0.16."""
    bandit, state = thompson(ARMS, (1,), discount=1.0), None
    state = bandit.init()
    deviation = 0.5
    for arm, mean in enumerate((10.0, 10.0 + deviation / np.sqrt(50) * np.sqrt(2))):
        for sign in (-1, 1) * 25:
            state = bandit.update(state, report(arm, 1, mean + sign * deviation, 1.0))
    keys = jax.random.split(jax.random.key(3), 3000)
    picks = np.asarray(jax.vmap(lambda k: bandit.select(state, k, context(1)))(keys))
    np.testing.assert_allclose(picks.mean(), 0.8413, atol=0.03)


def test_an_arm_that_nobody_runs_is_tried_again():
    bandit = thompson(ARMS, (1,), discount=0.9)
    state = bandit.update(bandit.init(), report(1, 1, 1.0, 1.0))
    for _ in range(40):
        state = bandit.update(state, report(0, 1, 100.0, 1.0))
    assert int(bandit.select(state, jax.random.key(0), context(1))) == 1
