"""A drafter for SmolLM2-135M-Instruct on small sums, at the two temperatures they are usually sampled at.

    make smollm2
    python -m experiments.drafter_warmup --config=experiments/configs/drafter/smollm2_arithmetic.py \\
        --workdir=runs/drafter_arithmetic

Up to 60 minutes on two CPU cores (2.4 s a step with other work beside it), most of them training. Muon on the features alone learns
much more from the same responses and steps than AdamW on both losses.
"""

from experiments import warmup_config


def get_config():
    c = warmup_config.get_config()
    c.model.source = "smollm2"
    c.task.name = "arithmetic"
    c.task.operations = ("+", "-")
    c.task.low, c.task.high = 1, 99
    c.task.eval_prompts = 32
    c.task.max_prompt_tokens = 64

    c.generation.tokens = 60_000
    c.generation.temperatures = "0.7,1.0"
    c.generation.max_new_tokens = 64

    c.training.steps = 1500
    c.training.row_length = 512
    c.training.draft_vocab_size = 4096
    c.training.optimizer, c.training.learning_rate = "muon", 6e-3
    c.training.feature_weight, c.training.token_weight = 1.0, 0.0
    return c
