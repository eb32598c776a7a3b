"""The settings of `experiments.drafter_warmup`, and the rules between them; see `config` for how they are declared."""

import dataclasses
from typing import Any

from ml_collections import config_dict

from adrl_jax.learner.optimizer import OPTIMIZERS, OptimizerConfig
from adrl_jax.tasks import division
from experiments import config, schema
from experiments.config import Config, Model, Runtime, Task
from experiments.schema import option, require

ALPHABETS = {"division": division.ALPHABET}
"""Tasks that an embedded model can speak."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """The responses that the drafter learns from: the policy's own, plainly decoded."""

    tokens: int = option(
        100_000, "response tokens, all temperatures together, at least; prompts are asked again where they run out", low=1
    )
    temperatures: str = option("0.9", "of the sampling laws, separated by commas, each > 0; the tokens are shared out evenly")
    first_prompt: int = option(0, "training prompts before this one are left out (a benchmark's own, say)", low=0)
    max_new_tokens: int = option(256, "longest response, in tokens", low=1)
    forced_length: bool = option(False, "every response has max_new_tokens tokens, end tokens or not, as in benchmarks")
    bare_questions: bool = option(False, "gsm8k: the question without an instruction before it, as benchmarks ask it")
    max_batch: int = option(64, "responses decoded at once", low=1)


@dataclasses.dataclass(frozen=True)
class Training:
    """The drafter, its loss and its optimizer."""

    architecture: str = option(
        "eagle",
        "`eagle` reads the target's last hidden state; `eagle3` a low, a middle and a high one (best with feature_weight=0)",
        choices=("eagle", "eagle3"),
    )
    start: str = option(
        "regression",
        "`regression`: from the best linear prediction, in steps that suit each weight; `random`: from fresh weights",
        choices=("regression", "random"),
    )
    steps: int = option(600, "optimizer steps, one lesson each; epochs follow from the number of lessons", low=1)
    rows: int = option(4, "packed rows of a lesson", low=1)
    row_length: int = option(0, "tokens of a packed row; 0 takes the longest prompt + response", low=0)
    draft_vocab_size: int = option(8192, "ids that may be drafted, the most frequent of the responses; 0 allows all", low=0)
    optimizer: str = option(
        "adamw",
        "of learner.optimizer; `muon` learnt most a step where compared, its steps took twice AdamW's time on CPU",
        choices=OPTIMIZERS,
    )
    learning_rate: float = option(3e-4, "peak step size, with linear warm-up and cosine decay to 0", above=0)
    warmup_share: float = option(0.05, "share of the steps that the learning rate rises in", low=0, below=1)
    weight_decay: float = option(0.0, "decoupled weight decay", low=0)
    max_grad_norm: float = option(1.0, "clip the gradient to this norm", above=0)
    feature_weight: float = option(0.1, "weight of the smooth-L1 loss on hidden states", low=0)
    token_weight: float = option(1.0, "weight of the soft cross-entropy on token laws", low=0)
    overlap_weight: float = option(0.0, "weight of the total variation distance between token laws", low=0)
    depths: int = option(1, "draft depths trained: 1 on true hidden states alone, more on predictions fed back", low=1, high=16)
    depth_decay: float = option(0.8, "each further depth counts this times the one before", above=0, high=1)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Held-out prompts, answered with the drafter before and after training."""

    samples: int = option(1, "responses to each held-out prompt", low=1)
    depth: int = option(5, "drafted tokens a pass, a chain", low=1)
    max_batch: int = option(16, "responses decoded at once", low=1)


@dataclasses.dataclass(frozen=True)
class WarmupConfig:
    """A warm-up."""

    seed: int = option(0, "names all randomness of the run", low=0, high=2**31 - 1)
    task: Task = dataclasses.field(default_factory=Task)
    model: Model = dataclasses.field(default_factory=Model)
    generation: Generation = dataclasses.field(default_factory=Generation)
    training: Training = dataclasses.field(default_factory=Training)
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    runtime: Runtime = dataclasses.field(default_factory=Runtime)


def get_config() -> config_dict.ConfigDict:
    """All defaults, for config files to edit."""
    return schema.defaults(WarmupConfig)


def temperatures(c: Any) -> tuple[float, ...]:
    """The sampling temperatures as numbers.

    Raises:
        ConfigError: one is not a number > 0, or comes twice.
    """
    found = []
    for text in c.generation.temperatures.split(","):
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        require(0 < value < float("inf"), "generation.temperatures", c.generation.temperatures, f"{text!r} is not a number > 0")
        found.append(value)
    require(len(set(found)) == len(found), "generation.temperatures", c.generation.temperatures, "none may come twice")
    return tuple(found)


def as_run(c: WarmupConfig) -> Config:
    """The settings of a training run with this task and model, for what is built from those alone."""
    run = Config()
    train = dataclasses.replace(run.train, max_new_tokens=c.generation.max_new_tokens, prompts_per_step=1)
    return dataclasses.replace(run, seed=c.seed, task=c.task, model=c.model, train=train, runtime=c.runtime)


def optimizer_config(c: WarmupConfig) -> OptimizerConfig:
    x = c.training
    rising = int(x.steps * x.warmup_share)
    return OptimizerConfig(
        learning_rate=x.learning_rate,
        schedule="cosine",
        warmup_steps=rising,
        total_steps=max(x.steps, rising + 1),
        weight_decay=x.weight_decay,
        clip_norm=x.max_grad_norm,
        name=x.optimizer,
    )


def check(c: WarmupConfig) -> None:
    """Raises ConfigError for the first rule that does not hold."""
    temperatures(c)
    config.freeze(as_run(c))
    x, g = c.training, c.generation
    weights = (x.feature_weight, x.token_weight, x.overlap_weight)
    require(any(weights), "training.feature_weight", x.feature_weight, "one weight of the loss must be > 0")
    longest = c.task.max_prompt_tokens + g.max_new_tokens
    require(
        x.row_length == 0 or x.row_length >= longest,
        "training.row_length",
        x.row_length,
        f"0, or at least task.max_prompt_tokens + generation.max_new_tokens = {longest}",
    )
    require(
        not g.bare_questions or c.task.name == "gsm8k",
        "generation.bare_questions",
        g.bare_questions,
        f"task.name={c.task.name} has no instruction to leave out",
    )
