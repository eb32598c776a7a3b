import jax
import numpy as np
from launches import context, report

from adrl_jax.bandit.ucb import ucb
from adrl_jax.speculation.strategy import OFF, Strategy

ARMS = (OFF, Strategy("eagle", 4), Strategy("ngram", 4))
KEY = jax.random.key(0)


def bounds(history, window, bonus):
    """The bound of every arm by its definition, in float64."""
    recent = history[-window:]
    means = np.asarray([np.mean([r for a, r in recent if a == arm] or [0.0]) for arm in range(3)])
    times = np.asarray([sum(a == arm for a, _ in recent) for arm in range(3)])
    with np.errstate(divide="ignore"):
        return np.where(times > 0, means + bonus * means.max() * np.sqrt(np.log(len(recent)) / np.maximum(times, 1)), np.inf)


def test_picks_the_largest_bound_of_the_window():
    bandit, rng = ucb(ARMS, (4,), window=17, bonus=0.3), np.random.default_rng(0)
    state, history = bandit.init(), []
    for _ in range(120):
        arm = int(bandit.select(state, KEY, context(4)))
        if len(history) >= 3:
            assert arm == np.argmax(bounds(history, 17, 0.3))
        tokens = float(rng.normal((10, 12, 11)[arm], 1.0))
        state = bandit.update(state, report(arm, 4, 4 * tokens, 1.0))
        history.append((arm, tokens))
    assert {a for a, _ in history} == {0, 1, 2}


def test_batch_buckets_do_not_share_reports():
    bandit = ucb(ARMS, (4, 16), bonus=0.0)
    state = bandit.init()
    for running, speeds in ((4, (1, 9, 3)), (16, (9, 1, 3))):
        for arm, speed in enumerate(speeds):
            state = bandit.update(state, report(arm, running, speed, 1.0))
    assert int(bandit.select(state, KEY, context(4))) == 1
    assert int(bandit.select(state, KEY, context(16))) == 0
