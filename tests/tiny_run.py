"""Settings of runs that take seconds: one layer of 16 channels, and answers of at most 20 tokens."""

from experiments import config


def tiny():
    """Editable; two prompts a step, four held out."""
    c = config.get_config()
    c.task.train_prompts, c.task.eval_prompts, c.task.max_prompt_tokens = 12, 4, 6
    c.task.max_steps, c.task.reward_workers = 5, 0
    m = c.model
    m.num_layers, m.hidden_size, m.intermediate_size = 1, 16, 32
    m.num_heads, m.num_kv_heads, m.head_dim, m.max_positions = 2, 1, 8, 64
    c.train.prompts_per_step, c.train.group_size, c.train.max_new_tokens = 2, 2, 20
    c.rollout.max_batch, c.rollout.batch_buckets = 4, (4,)
    c.warm_start.batch_size, c.warm_start.examples = 4, 8
    return c
