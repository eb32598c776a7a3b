"""A proxy reward model for the quickstart's task, on the policy that experiments.sft trained.

    python -m experiments.reward_model --config=experiments/configs/rlhf/division_proxy.py --workdir=runs/proxy

About two minutes on two CPU cores. Expect it to tell right from wrong answers of held-out prompts in most pairs; how often is in
reward_model.json.
"""

from experiments import reward_config


def get_config(policy="runs/sft/policy"):
    c = reward_config.get_config()
    c.model.source = policy
    c.task.name = "division"
    c.task.train_prompts = 4096
    c.task.max_prompt_tokens = 6
    c.task.reward_workers = 0
    c.preferences.prompts = 512
    c.preferences.max_new_tokens = 104
    c.training.steps = 150
    return c
