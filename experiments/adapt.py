"""The drafter's part of a run: when it learns, what from, and on how many devices a rollout runs. Nothing is compiled here."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from adrl_jax.drafter.buffer import DataBuffer
from adrl_jax.drafter.monitor import MonitorConfig
from adrl_jax.drafter.trainer import DrafterTrainer, Heads, TrainerConfig
from adrl_jax.learner import packing
from adrl_jax.learner.optimizer import make_optimizer
from adrl_jax.rollout.engine import Engine
from adrl_jax.runtime.adapting import Adapting, AdaptingConfig
from adrl_jax.runtime.groups import EngineGroup
from adrl_jax.speculation.drafter import Drafter
from adrl_jax.speculation.eagle import Eagle
from experiments import resolve, rules
from experiments.config import Config
from experiments.schema import require

if TYPE_CHECKING:
    from experiments.build import Policy


def adapting(c: Config, target: "Policy", eagle: Eagle | None) -> Adapting:
    """When the drafter learns, where there is one, and what it learns from."""
    if eagle is None:
        return Adapting()
    d, trainer = c.drafter, None
    if d.when == "spot":
        # Room for the longest sequence; shorter ones share a row.
        longest = c.task.max_prompt_tokens + c.train.max_new_tokens
        row_length = packing.round_up(longest, 64)
        # A response that alone exceeds the buffer would end the run in the middle of a rollout.
        needed = longest * eagle.target.hidden_channels * jnp.dtype(eagle.target.compute_dtype).itemsize
        require(
            needed <= d.buffer_megabytes * 2**20,
            "drafter.buffer_megabytes",
            d.buffer_megabytes,
            f"at least {-(-needed // 2**20)}, the hidden states of one response of {longest} tokens with its prompt",
        )
        trainer = DrafterTrainer(
            eagle.target,
            resolve.drafter_loss_config(c),
            make_optimizer(resolve.drafter_optimizer_config(c)),
            DataBuffer(d.buffer_megabytes * 2**20, row_length),
            Heads(),
            TrainerConfig(c.seed, d.spot_rows),
            valid_vocab=target.tokenizer.size,
            device=jax.devices()[0],
        )
    settings = AdaptingConfig(d.when, (eagle.name, "merged"), d.spot_steps, d.save_every)
    return Adapting(settings, MonitorConfig(fall=d.fall), rules.strategies(c), eagle, trainer)


def engine(c: Config, target: "Policy", found: dict[str, Drafter], adapting: Adapting) -> Engine | EngineGroup:
    """One engine, or one on each of `drafter.spot_groups` devices."""
    settings = resolve.engine_config(c, tuple(target.tokenizer.eos_ids), target.tokenizer.size)
    groups = c.drafter.spot_groups
    if groups == 1:
        return Engine(target.config, settings, found)
    require(groups <= jax.device_count(), "drafter.spot_groups", groups, f"at most {jax.device_count()}, the devices there are")
    devices = jax.devices()[:groups]
    engines = [Engine(target.config, settings, found) for _ in devices]
    return EngineGroup(engines, devices, train=lambda group: adapting.trainer.try_step(devices[group]))
