"""Contexts and reports of made-up launches."""

import numpy as np

from adrl_jax.bandit.base import Context, Report
from adrl_jax.speculation.strategy import OFF, Strategy

DEPTH = 4
ARMS = (OFF, Strategy("eagle", 1), Strategy("eagle", 2), Strategy("eagle", 4), Strategy("ngram", 2))
BATCHES = (1, 4, 16, 64)


def batch_of(running):
    return next(b for b in (*BATCHES, 1024) if b >= running)


def context(running, batch=None, cache=256):
    return Context(running, batch_of(running) if batch is None else batch, cache)


def report(arm, running, tokens, seconds, batch=None, cache=256, rounds=8, examined=None, accepted=None, depth=DEPTH):
    """A launch; without counts, one in which no draft was looked at."""
    zeros = np.zeros(depth, np.float32)
    examined = zeros if examined is None else np.asarray(examined, np.float32)
    accepted = zeros if accepted is None else np.asarray(accepted, np.float32)
    batch = batch_of(running) if batch is None else batch
    return Report(arm, running, batch, cache, rounds, tokens, seconds, examined, accepted)


def steady(arm, running, chance, seconds, rounds=8, arms=ARMS, depth=DEPTH):
    """A launch in which exactly the share `chance` of the drafts that were looked at stood, whole numbers or not.

    Args:
        arm: index into `arms`.
        running: rows.
        chance: drafter -> share, the same at all depths.
        seconds: `[len(arms)]` or a function of (arm, running), of a round.
    """
    strategy, passes = arms[arm], float(rounds * running)
    share = chance.get(strategy.drafter, 0.0)
    reach = passes * share ** np.arange(depth + 1) * (np.arange(depth + 1) <= strategy.depth)
    examined = reach[:-1] * (np.arange(depth) < strategy.depth)
    each = seconds(arm, running) if callable(seconds) else seconds[arm]
    accepted = reach[1:]
    return report(
        arm, running, passes + accepted.sum(), rounds * each, rounds=rounds, examined=examined, accepted=accepted, depth=depth
    )
