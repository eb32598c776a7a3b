"""A run of the loop that takes seconds."""

import tiny_run

from adrl_jax.types import Score
from experiments import config


def settings(**changes):
    c = tiny_run.tiny()
    c.train.steps, c.warm_start.steps, c.rollout.strategies = 3, 2, ("off", "eagle-d2")
    c.bandit.thresholds = (1,)
    c.learner.row_length, c.learner.row_multiple, c.learner.minibatches = 32, 4, 2
    c.checkpoint.every = 2
    c.log.compare_repeats, c.log.tensorboard = 1, False
    c.update_from_flattened_dict(changes)
    return config.freeze(c)


def by_length(items):
    """A reward that an untrained model varies in."""
    return [Score(len(text) / 20, text[:3], "match", {"length": len(text) / 20}) for _, text, _ in items]
