import jax
import numpy as np
from launches import context, report

from adrl_jax.bandit.exp3 import FADE, exp3
from adrl_jax.speculation.strategy import OFF, Strategy

ARMS = (OFF, Strategy("eagle", 4), Strategy("ngram", 4))


def chances(weights, rate):
    return (1 - rate) * weights / weights.sum() + rate / len(weights)


def test_weights_and_shares_of_picks_follow_the_published_rule():
    rate, mix = 0.2, 0.01
    bandit, rng = exp3(ARMS, (2,), rate=rate, mix=mix), np.random.default_rng(2)
    state, weights, largest = bandit.init(), np.ones(3), 0.0
    for arm, value in zip(rng.integers(0, 3, 40), rng.uniform(0.2, 1.0, 40)):
        state = bandit.update(state, report(int(arm), 2, 2 * value, 1.0, batch=2))
        largest = max(FADE * largest, value)
        p = chances(weights, rate)
        gained = weights * np.exp(rate / 3 * (value / largest / p[arm]) * (np.arange(3) == arm))
        weights = gained + mix / 3 * gained.sum()
    np.testing.assert_allclose(state.log_weight[0], np.log(weights / weights.max()), atol=1e-4)
    keys = jax.random.split(jax.random.key(5), 4000)
    picks = np.asarray(jax.vmap(lambda k: bandit.select(state, k, context(2, batch=2)))(keys))
    np.testing.assert_allclose(np.bincount(picks, minlength=3) / 4000, chances(weights, rate), atol=0.03)


def test_no_arm_falls_below_its_share_of_random_picks():
    bandit = exp3(ARMS, (2,), rate=0.3)
    state = bandit.init()
    for _ in range(300):
        state = bandit.update(state, report(1, 2, 2.0, 1.0, batch=2))
    keys = jax.random.split(jax.random.key(6), 4000)
    picks = np.asarray(jax.vmap(lambda k: bandit.select(state, k, context(2, batch=2)))(keys))
    np.testing.assert_allclose(np.bincount(picks, minlength=3) / 4000, (0.1, 0.8, 0.1), atol=0.03)
