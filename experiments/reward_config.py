"""The settings of `experiments.reward_model`, and the rules between them; see `config` for how they are declared."""

import dataclasses
from typing import Any

from ml_collections import config_dict

from experiments import config, schema
from experiments.config import Config, Model, Runtime, Task
from experiments.schema import option, require


@dataclasses.dataclass(frozen=True)
class Preferences:
    """Responses of the policy in pairs, the better one by the gold reward."""

    prompts: int = option(512, "training prompts that are answered", low=2)
    samples: int = option(4, "responses to each; the best and the worst make a pair, ties make none", low=2)
    temperature: float = option(1.0, "of the sampling law", above=0)
    max_new_tokens: int = option(104, "longest response, in tokens", low=1)
    max_batch: int = option(64, "responses decoded at once", low=1)
    gold: str = option("", "folder of a reward model that judges; empty: the task's own score")
    held_out: float = option(0.2, "share of the pairs that accuracy and calibration are measured on", above=0, below=1)
    label_noise: float = option(0.0, "share of training pairs whose label is turned round", low=0, below=0.5)


@dataclasses.dataclass(frozen=True)
class Training:
    """Bradley-Terry training."""

    steps: int = option(200, "updates", low=1)
    batch_pairs: int = option(32, "pairs of an update", low=1)
    learning_rate: float = option(3e-4, "AdamW's peak step size, with linear warm-up over a tenth and linear decay", above=0)
    weight_decay: float = option(0.01, "decoupled weight decay", low=0)
    max_grad_norm: float = option(1.0, "clip the gradient to this norm", above=0)
    microbatch_rows: int = option(8, "packed rows whose gradient is computed at once", low=1)


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """A reward model."""

    seed: int = option(0, "names all randomness of the run", low=0, high=2**31 - 1)
    task: Task = dataclasses.field(default_factory=Task)
    model: Model = dataclasses.field(default_factory=Model)
    preferences: Preferences = dataclasses.field(default_factory=Preferences)
    training: Training = dataclasses.field(default_factory=Training)
    runtime: Runtime = dataclasses.field(default_factory=Runtime)


def get_config() -> config_dict.ConfigDict:
    """All defaults, for config files to edit."""
    return schema.defaults(RewardConfig)


def as_run(c: RewardConfig) -> Config:
    """The settings of a training run with this task and model, for what is built from those alone."""
    run = Config()
    train = dataclasses.replace(run.train, max_new_tokens=c.preferences.max_new_tokens, prompts_per_step=1)
    return dataclasses.replace(run, seed=c.seed, task=c.task, model=c.model, train=train, runtime=c.runtime)


def check(c: Any) -> None:
    """Raises ConfigError for the first rule that does not hold."""
    config.freeze(as_run(c))
    require(
        c.preferences.prompts <= c.task.train_prompts,
        "preferences.prompts",
        c.preferences.prompts,
        f"at most task.train_prompts={c.task.train_prompts}",
    )
    require(not c.task.reward_model, "task.reward_model", c.task.reward_model, "name the judge as preferences.gold here")
