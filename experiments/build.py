"""Puts a run together: loads or makes the model, opens the task, builds engine and updates. Nothing is compiled here.

Whatever a user can get wrong (files, sizes, paths) fails here, with a message that names it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from adrl_kernels import choice

from adrl_jax.bandit.base import Bandit, signature
from adrl_jax.bandit.beg import beg, beg_static
from adrl_jax.bandit.exp3 import exp3
from adrl_jax.bandit.fixed import fixed
from adrl_jax.bandit.goodput import goodput
from adrl_jax.bandit.thompson import thompson
from adrl_jax.bandit.ucb import ucb
from adrl_jax.drafter import checkpoint as saved_drafter
from adrl_jax.learner import supervised
from adrl_jax.learner.disagreement import Measure, make_measure
from adrl_jax.models import tokenizer as tokenizers
from adrl_jax.models import transformer, weights
from adrl_jax.models.families import ModelConfig
from adrl_jax.rewards import reward_model
from adrl_jax.rewards.pool import ScorerPool
from adrl_jax.runtime import arms
from adrl_jax.runtime.collect import Scorer
from adrl_jax.runtime.groups import Grouped
from adrl_jax.runtime.parts import Parts
from adrl_jax.speculation.drafter import Drafter
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.eagle3 import Eagle3
from adrl_jax.speculation.history import History
from adrl_jax.speculation.history_store import HistoryStore
from adrl_jax.speculation.merged import Merged
from adrl_jax.speculation.model import ModelDrafter, check_compatible
from adrl_jax.speculation.ngram import Ngram
from adrl_jax.tasks import division, registry
from adrl_jax.types import PackedBatch, Prompt
from experiments import adapt, devices, learners, resolve, rules
from experiments.config import Config
from experiments.learners import Policy, packer, row_lengths
from experiments.schema import ConfigError, require

ALPHABETS = {"division": division.ALPHABET}
"""Tasks that an embedded model can speak, and in which characters."""


def policy(c: Config, alphabet: str | None) -> Policy:
    """Loads `model.source`, or sets up the embedded model over the task's `alphabet`.

    Raises:
        ConfigError: the task has no alphabet of its own, so no embedded model can speak it.
        FileNotFoundError, ValueError: as `weights.load`.
    """
    if c.model.source == "embedded":
        require(alphabet is not None, "model.source", c.model.source, f"task.name={c.task.name} is in words; name real weights")
        tokenizer = tokenizers.CharTokenizer(alphabet)
        config = resolve.model_config(c, tokenizer.size)
        return Policy(config, tokenizer, lambda: _fresh(config, c), "embedded")
    model = _load(c.model.source)
    if model.tokenizer is None:
        raise ConfigError(f"model.source={c.model.source!r} has no tokenizer beside its weights")
    rules.check_positions(c, model.config.max_positions)
    held = [model.params]

    def make() -> Any:
        # The first caller takes the loaded arrays over, so that no further copy of a large model stays in memory.
        return held.pop() if held else _load(c.model.source).params

    return Policy(dataclasses.replace(model.config, dtype=c.model.dtype), model.tokenizer, make, model.source)


def _fresh(config: ModelConfig, c: Config) -> Any:
    params = transformer.init_params(config, jax.random.key(c.seed))
    scale = c.model.init_std / 0.02  # what init_params draws matrices with
    return jax.tree.map(lambda x: x * scale if x.ndim >= 2 else x, params)


def _load(source: str) -> weights.Model:
    """Float32 weights, which is what the learner keeps whatever is served."""
    return weights.load_named(source) if source in weights.NAMED else weights.load(source)


def trained_drafter(c: Config, target: Policy) -> Eagle | None:
    """The drafter that learns along with the policy, where a strategy uses it, alone or merged."""
    names = {s.drafter for s in rules.strategies(c)}
    if not names & set(rules.LEARNED):
        return None
    kind = Eagle3 if "eagle3" in names else Eagle
    if not c.drafter.path:
        return kind(target.config)
    found = saved_drafter.load(c.drafter.path, target.config)[0]
    arms = ", ".join(sorted(names & set(rules.LEARNED)))
    fits = found.name == kind.name or names.isdisjoint({"eagle", "eagle3"})
    require(fits, "drafter.path", c.drafter.path, f"it holds an `{found.name}` drafter, and rollout.strategies has {arms} arms")
    return found


def drafters(c: Config, target: Policy, eagle: Eagle | None) -> tuple[dict[str, Drafter], dict[str, Any]]:
    """The drafters that the strategies name, and the served weights of those that are not trained here."""
    names = {s.drafter for s in rules.strategies(c) if s.speculates}
    found: dict[str, Drafter] = {}
    served: dict[str, Any] = {}
    d = c.drafter
    if "ngram" in names:
        found["ngram"] = Ngram(d.ngram_max, d.ngram_min)
    history = History(d.history_reference, d.history_max, d.history_min, positional=c.sampling.reuse_noise_across_epochs)
    if "history" in names:
        found["history"] = history
    if eagle is not None and eagle.name in names:
        found[eagle.name] = eagle
    if "merged" in names:
        found["merged"] = Merged(history, eagle, d.merged_min_match)
    if "model" in names:
        small = _load(d.model)
        if small.tokenizer is None:
            raise ConfigError(f"drafter.model={d.model!r} has no tokenizer beside its weights")
        check_compatible(target.tokenizer, small.tokenizer, target.config.vocab_size, small.config.vocab_size)
        small_config = dataclasses.replace(small.config, dtype=c.model.dtype)
        found["model"] = ModelDrafter(small_config, target.config.vocab_size)
        served["model"] = transformer.engine_layout(small.params, small_config)
    return found, served


def history_store(c: Config) -> HistoryStore | None:
    """Earlier responses, where a strategy looks things up in them."""
    if not any(s.drafter in ("history", "merged") for s in rules.strategies(c)):
        return None
    d = c.drafter
    per_text = max(c.train.max_new_tokens // 8, 1)  # a bound on how many texts there are, for short ones
    return HistoryStore(
        max_tokens=d.history_tokens,
        max_texts=max(d.history_tokens // per_text, 1),
        max_responses=d.history_responses,
        context=d.history_max,
    )


def bandit(c: Config) -> Bandit:
    """The controller that the settings name."""
    arms, batches, b = rules.strategies(c), rules.batch_buckets(c), c.bandit
    makers: dict[str, Callable[[], Bandit]] = {
        "goodput": lambda: goodput(arms, batches, exploration=b.exploration),
        "beg": lambda: beg(arms, rules.thresholds(c), b.epsilon, b.window),
        "beg_static": lambda: beg_static(arms, rules.thresholds(c)),
        "ucb": lambda: ucb(arms, batches, window=b.window),
        "thompson": lambda: thompson(arms, batches),
        "exp3": lambda: exp3(arms, batches),
        "fixed": lambda: fixed(c.rollout.strategies.index(b.arm), len(arms)),
    }
    return makers[b.name]()


def disagreement(c: Config, config: ModelConfig, valid_vocab: int) -> Measure | None:
    """What tells how stale data are; None where tokens do not come from coupled noise."""
    if c.rollout.verification != "coupled":
        return None
    return make_measure(config, seed=c.seed, temperature=c.sampling.temperature, valid_vocab=valid_vocab)


def check_prompts(c: Config, name: str, prompts: Sequence[Prompt]) -> None:
    """Raises ConfigError for the first prompt longer than `task.max_prompt_tokens`."""
    for p in prompts:
        require(
            len(p.token_ids) <= c.task.max_prompt_tokens,
            "task.max_prompt_tokens",
            c.task.max_prompt_tokens,
            f"prompt {p.prompt_id} of the {name} split has {len(p.token_ids)} tokens ({p.text[:60]!r} …)",
        )


def identity(c: Config, target: Policy) -> dict[str, Any]:
    """What a checkpoint belongs to: model, tokenizer, task and seed."""
    model = {f"model.{k}": v for k, v in dataclasses.asdict(target.config).items() if k not in ("rope_scaling", "taps")}
    task = {"task.name": c.task.name, "task.train_prompts": c.task.train_prompts}
    return {"seed": c.seed, "tokenizer": target.tokenizer.fingerprint(), **model, **task}


def warm_batches(c: Config, task: Any, target: Policy, pack: Callable[..., PackedBatch]) -> Callable[[int], PackedBatch]:
    """`step -> PackedBatch` of worked examples, each epoch in an order of its own.

    Raises:
        ConfigError: a worked example is longer than a response may be.
    """
    size, count, most = c.warm_start.batch_size, c.warm_start.examples, c.train.max_new_tokens
    end = np.array(target.tokenizer.eos_ids[:1], np.int32)
    examples = []
    for i in range(count):
        prompt, response = task.supervised_example(i)
        ids = np.concatenate([target.tokenizer.encode(response), end])
        require(len(ids) <= most, "train.max_new_tokens", most, f"worked example {i} has {len(ids)} response tokens")
        examples.append((target.tokenizer.encode(prompt), ids))

    def batch(step: int) -> PackedBatch:
        places = np.arange(step * size, (step + 1) * size)
        orders = {int(e): np.random.default_rng([c.seed, int(e)]).permutation(count) for e in np.unique(places // count)}
        chosen = [examples[orders[p // count][p % count]] for p in places.tolist()]
        return pack(supervised.examples(chosen), np.zeros(size, np.float32), 0)

    return batch


@contextlib.contextmanager
def opened(c: Config) -> Iterator[Parts]:
    """The parts of a run, with the scorer's workers running until the context ends. Raises as `build`."""
    task = open_task(c)
    with scoring(c, task) as scorer:
        yield build(c, task, scorer)


def open_task(c: Config) -> Any:
    """The task that the settings name, not yet encoded."""
    t = c.task
    options: dict[str, Any] = {
        "division": dict(
            seed=t.seed,
            median_steps=t.median_steps,
            sigma=t.sigma,
            max_steps=t.max_steps,
            max_dividend=t.max_dividend,
            max_divisor=t.max_divisor,
            slip_rate=t.slip_rate,
            train_size=t.train_prompts,
            test_size=t.eval_prompts,
        ),
        "arithmetic": dict(seed=t.seed, operations=t.operations, low=t.low, high=t.high, mode=t.answer_mode),
        "gsm8k": dict(data=t.path, mode=t.answer_mode),
    }[t.name]
    return registry.build(t.name, **options)


@contextlib.contextmanager
def scoring(c: Config, task: Any) -> Iterator[Scorer]:
    """A scorer of batches: in worker processes with a time-out, or (`task.reward_workers=0`) in this process."""
    if c.task.reward_workers == 0:
        yield lambda items: [task.score(*item) for item in items]
        return
    with ScorerPool(task.score, workers=c.task.reward_workers, timeout_s=c.task.reward_timeout) as pool:
        yield pool.score


def judge(c: Config, folder: str) -> Scorer:
    """The reward model that lies in a folder, as a scorer of a run's responses."""
    longest = c.task.max_prompt_tokens + c.train.max_new_tokens
    return reward_model.Rewarder(reward_model.load(folder), row_lengths(longest)[0])


def build(c: Config, task: Any, scorer: Scorer) -> Parts:
    """Everything the loop needs.

    Args:
        c: checked settings.
        task: not yet encoded; see `open_task`.
        scorer: scores a batch of responses.

    Raises:
        ConfigError, ValueError, FileNotFoundError: something that the user can mend.
    """
    learner_devices, generator_device = devices.groups(c)
    try:
        choice.check_platform(c.kernels.implementation, "kernels.implementation")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    target = policy(c, ALPHABETS.get(c.task.name))
    task = task.encode(target.tokenizer)
    train, held_out = task.prompts("train"), task.prompts("test")
    require(len(train) > 0, "task.path", c.task.path, "no training prompts in it")
    eval_prompts = held_out[: c.task.eval_prompts]
    check_prompts(c, "train", train[: c.task.train_prompts])
    check_prompts(c, "test", eval_prompts)

    eagle = trained_drafter(c, target)
    found, served = drafters(c, target, eagle)
    adapts = adapt.adapting(c, target, eagle)
    valid_vocab = target.tokenizer.size
    mesh = devices.mesh(learner_devices)
    learning = learners.build(c, target, eagle, mesh)
    warm = c.warm_start.steps > 0
    strategies = rules.strategies(c)
    replay = c.rollout.replay_arms
    controller, groups = bandit(c), c.drafter.spot_groups
    named = signature(c.bandit.name, strategies, batches=rules.batch_buckets(c), thresholds=rules.thresholds(c))
    return Parts(
        model_config=target.config,
        tokenizer=target.tokenizer,
        train_prompts=train[: c.task.train_prompts],
        eval_prompts=eval_prompts,
        scorer=judge(c, c.task.reward_model) if c.task.reward_model else scorer,
        eval_scorer=scorer if c.task.reward_model else None,
        engine=adapt.engine(c, target, found, adapts),
        strategies=strategies,
        bandit=controller if groups == 1 else Grouped(controller, groups),
        controller=named if groups == 1 else f"{named}, on {groups} device groups",
        history=history_store(c),
        init_learner=learning.init,
        prepare=learning.prepare,
        update=learning.update,
        begin_rl=learning.begin_rl,
        warm_batch=warm_batches(c, task, target, packer(c, target.config)) if warm else None,
        warm_update=learning.warm_update,
        fixed_drafters=served,
        replay=arms.load(Path(replay), strategies, range(1, c.train.steps + 1)) if replay else None,
        identity=identity(c, target),
        disagreement=disagreement(c, target.config, valid_vocab),
        generator_device=generator_device,
        drafter_name="eagle" if eagle is None else eagle.name,
        adapting=adapts,
        frozen_update=learning.frozen_update,
    )
