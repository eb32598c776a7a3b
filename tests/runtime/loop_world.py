"""A run of the loop that takes seconds."""

from adrl_jax.types import Score
from experiments import config


def settings(**changes):
    c = config.get_config()
    c.task.train_prompts, c.task.eval_prompts, c.task.max_prompt_tokens = 12, 4, 6
    c.task.max_steps, c.task.reward_workers = 5, 0
    m = c.model
    m.num_layers, m.hidden_size, m.intermediate_size = 1, 16, 32
    m.num_heads, m.num_kv_heads, m.head_dim, m.max_positions = 2, 1, 8, 64
    c.train.steps, c.train.prompts_per_step, c.train.group_size, c.train.max_new_tokens = 3, 2, 2, 20
    c.rollout.strategies, c.rollout.max_batch, c.rollout.batch_buckets = ("off", "eagle-d2"), 4, (4,)
    c.bandit.thresholds = (1,)
    c.learner.row_length, c.learner.row_multiple, c.learner.minibatches = 32, 4, 2
    c.warm_start.steps, c.warm_start.batch_size, c.warm_start.examples = 2, 4, 8
    c.checkpoint.every = 2
    c.log.compare_repeats, c.log.tensorboard = 1, False
    c.update_from_flattened_dict(changes)
    return config.freeze(c)


def by_length(items):
    """A reward that an untrained model varies in."""
    return [Score(len(text) / 20, text[:3], "match", {"length": len(text) / 20}) for _, text, _ in items]
