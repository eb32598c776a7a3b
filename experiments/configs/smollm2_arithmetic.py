"""SmolLM2-135M-Instruct, real weights, learns to answer sums with the sum.

make smollm2
python -m experiments.train --config=experiments/configs/smollm2_arithmetic.py --workdir=runs/smollm2_arithmetic

Expect the reward on held-out sums (temperature 1) to rise from 0.13 to 0.99 in 30 steps, 8 to 15 minutes on two CPU cores. Most of
the first answers are cut off at 24 tokens: what is learnt first is to answer and stop.
"""

from experiments import config, presets


def get_config(preset="grpo"):
    c = config.get_config()
    c.model.source = "smollm2"
    c.task.name = "arithmetic"
    c.task.operations = ("+",)
    c.task.low, c.task.high = 1, 9
    c.task.train_prompts = 64
    c.task.eval_prompts = 17
    c.task.max_prompt_tokens = 64
    c.task.reward_workers = 0

    c.train.steps = 30
    c.train.prompts_per_step = 8
    c.train.group_size = 8
    c.train.max_new_tokens = 24
    c.evaluation.samples = 8
    c.evaluation.every = 10

    c.rollout.strategies = ("off", "ngram-d3")
    c.rollout.max_batch = 64
    c.rollout.batch_buckets = (4, 16, 64)
    c.rollout.cache_bucket = 32
    c.rollout.rounds_per_launch = 8

    c.learner.learning_rate = 2e-5
    c.learner.row_length = 128
    c.learner.row_multiple = 24
    c.learner.target_multiple = 96

    c.checkpoint.every = 30
    c.checkpoint.keep = 1
    return presets.apply(c, preset)
