"""A drafter for SmolLM2-135M-Instruct on GSM8K's word problems.

    make smollm2
    python -m experiments.drafter_warmup --config=experiments/configs/drafter/smollm2_gsm8k.py --workdir=runs/drafter_gsm8k \\
        --config.task.path=PATH

PATH is a folder with train.jsonl and test.jsonl, as for experiments/configs/smollm2_gsm8k.py. Half an hour to 40 minutes on two
CPU cores: answers, reading them, and training take about a third each. For the benchmarks, whose questions stand bare and whose
answers are cut at forced lengths, add

        --config.generation.bare_questions=True --config.generation.forced_length=True --config.generation.first_prompt=64
"""

from experiments import warmup_config


def get_config():
    c = warmup_config.get_config()
    c.model.source = "smollm2"
    c.task.name = "gsm8k"
    c.task.train_prompts = 4096
    c.task.eval_prompts = 16
    c.task.max_prompt_tokens = 320

    c.generation.tokens = 200_000
    c.generation.temperatures = "0.9"
    c.generation.max_new_tokens = 320

    c.training.steps = 2000
    c.training.draft_vocab_size = 8192
    c.training.depths = 3
    return c
