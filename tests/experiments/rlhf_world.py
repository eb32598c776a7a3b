"""Settings of stages and studies that take seconds."""

import tiny_run


def tiny():
    c = tiny_run.tiny()
    c.train.steps, c.warm_start.steps, c.rollout.strategies = 2, 3, ("off",)
    c.learner.row_length, c.learner.row_multiple, c.learner.target_multiple = 64, 2, 64
    c.log.compare_repeats, c.log.tensorboard, c.log.report = 0, False, False
    return c
