"""SmolLM2-135M-Instruct on GSM8K's word problems.

    make smollm2
    python -m experiments.train --config=experiments/configs/smollm2_gsm8k.py --workdir=runs/smollm2_gsm8k \\
        --config.task.path=PATH

PATH is a folder with train.jsonl and test.jsonl (or .parquet), one such file, or a `datasets` name such as openai/gsm8k.
A step of 4 x 4 responses of up to 160 tokens takes 1 to 2 minutes on two CPU cores; 3 of 91 problems are solved greedily before
training, so expect the run to work and the reward to stay near 0.03.
"""

from experiments import config, presets


def get_config(preset="grpo"):
    c = config.get_config()
    c.model.source = "smollm2"
    c.task.name = "gsm8k"
    c.task.train_prompts = 8192
    c.task.eval_prompts = 32
    c.task.max_prompt_tokens = 320
    c.task.reward_workers = 1

    c.train.steps = 20
    c.train.prompts_per_step = 4
    c.train.group_size = 4
    c.train.max_new_tokens = 160

    c.rollout.strategies = ("off", "ngram-d3", "eagle-d3")
    c.rollout.max_batch = 32
    c.rollout.batch_buckets = (1, 4, 16, 32)
    c.rollout.cache_bucket = 64

    c.learner.learning_rate = 2e-6
    c.checkpoint.every = 10
    c.checkpoint.keep = 1
    return presets.apply(c, preset)
