"""Puts the learner of a run together: states, updates, and what lies between scored rollouts and packed batches."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.drafter import checkpoint as saved_drafter
from adrl_jax.learner import advantages, lora, packing, scalar, supervised
from adrl_jax.learner.optimizer import make_optimizer
from adrl_jax.learner.update import LearnerState, Update, init_state, make_log_probs, make_update, policy_params
from adrl_jax.learner.value import ValueConfig, make_value_update
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.tokenizer import Tokenizer
from adrl_jax.rewards import reward_model
from adrl_jax.runtime.experience import Experience
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.types import PackedBatch, Rollout
from experiments import learner_rules, resolve, rules
from experiments.config import Config

_ADVANTAGES = {
    "grpo": advantages.group_normalized,
    "dr_grpo": advantages.group_centered,
    "rloo": advantages.leave_one_out,
    "batch": advantages.batch_normalized,
    "optimal": advantages.optimal_baseline,
}


@dataclasses.dataclass(frozen=True)
class Policy:
    """The model a run trains.

    Attributes:
        config: sizes and traits.
        tokenizer: of the model or of the task.
        make: fresh float32 parameters, the same at every call.
        source: where they come from, for logs and checkpoints.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    make: Callable[[], Any]
    source: str


def row_lengths(longest: int) -> tuple[int, ...]:
    """Candidate row lengths: 1, 1.5, 2, 3, 4, 6, … times 64 tokens, from the first that holds `longest` to four times that."""
    steps = [64 * 2**i * k // 2 for i in range(24) for k in (2, 3)]
    fitting = [n for n in steps if n >= longest]
    return tuple(n for n in fitting if n <= 4 * fitting[0])


def cost_model(config: ModelConfig) -> packing.CostModel:
    """Floating-point operations of an update by token, target and attended pair. Deterministic, unlike a stop-watch: a
    choice that looked at the clock would pack a resumed run differently, and its weights would differ in the last bits."""
    c = config
    heads = (c.num_heads + 2 * c.num_kv_heads + c.num_heads) * c.head_dim
    layer = c.hidden_size * (heads + (3 if c.gated_mlp else 2) * c.intermediate_size)
    return packing.CostModel(
        per_token=6.0 * c.num_layers * layer,
        per_target=6.0 * c.vocab_size * c.hidden_size,
        per_pair=12.0 * c.num_layers * c.num_heads * c.head_dim,
    )


def packer(c: Config, config: ModelConfig, together: bool = False) -> Callable[[Sequence[Rollout], Any, int], PackedBatch]:
    """`(rollouts, advantages, version) -> PackedBatch`; `together` keeps the responses of a group in one row."""
    x = c.learner
    # Rows come in multiples that devices, microbatches and the user's own multiple all divide.
    multiple = int(np.lcm(x.devices * x.microbatch_rows, x.row_multiple))
    cost = cost_model(config)

    def pack(rollouts: Sequence[Rollout], values: Any, version: int) -> PackedBatch:
        sizes = dict(layout=x.layout, row_multiple=multiple, target_multiple=x.target_multiple, together=together)
        longest = c.task.max_prompt_tokens + c.train.max_new_tokens
        if together:
            longest = packing.longest_unit(rollouts, x.layout, True)
        length = x.row_length or packing.choose_row_length(rollouts, row_lengths(longest), cost, **sizes)
        return packing.pack(rollouts, values, row_length=length, version=version, **sizes)

    return pack


@dataclasses.dataclass(frozen=True)
class Learning:
    """What the loop needs of the learner; see the fields of the same names in `runtime.parts.Parts`."""

    init: Callable[[], LearnerState]
    prepare: Experience
    update: Callable[[LearnerState, PackedBatch], tuple[LearnerState, dict[str, Any]]]
    begin_rl: Callable[[LearnerState], LearnerState]
    warm_update: Update | None
    frozen_update: Callable[[LearnerState, PackedBatch], tuple[LearnerState, dict[str, Any]]] | None


def build(c: Config, target: Policy, eagle: Eagle | None, mesh: jax.sharding.Mesh) -> Learning:
    """The learner that the settings name. Nothing is compiled."""
    x, loss = c.learner, learner_rules.loss_config(c)
    valid_vocab = target.tokenizer.size
    optimizer = make_optimizer(resolve.optimizer_config(c))
    shared: dict[str, Any] = dict(
        microbatch_rows=x.microbatch_rows,
        valid_vocab=valid_vocab,
        remat=x.remat,
        vocab_block=x.vocab_block or None,
        kernels=rules.learner_kernels(c),
    )
    with_drafter: dict[str, Any] = dict(
        drafter=resolve.drafter_loss_config(c),
        drafter_optimizer=make_optimizer(resolve.drafter_optimizer_config(c)) if eagle is not None else None,
    )
    # A pass keeps what the drafter reads.
    read = target.config if eagle is None else eagle.target
    warm_update = None
    if c.warm_start.steps:
        warm_optimizer = make_optimizer(resolve.warm_optimizer_config(c))
        warm_update = supervised.make_supervised_update(read, warm_optimizer, mesh, **shared, **with_drafter)

    def policy_update(**extra: Any) -> Callable[[LearnerState, PackedBatch], tuple[LearnerState, dict[str, Any]]]:
        law = dict(temperature=c.sampling.temperature, ess_base=x.ess_base)
        made = make_update(read, loss, optimizer, mesh, **law, **shared, **extra)
        return _with_value(made, _value_update(c, target.config, mesh)) if x.advantage == "gae" else made

    update = policy_update(**(with_drafter if c.drafter.when in ("joint", "on_demand") else {}))
    frozen = policy_update() if c.drafter.when == "on_demand" else None
    log_probs = make_log_probs(
        target.config,
        temperature=c.sampling.temperature,
        valid_vocab=valid_vocab,
        vocab_block=x.vocab_block or None,
        mesh=mesh,
    )
    prepare = Experience(
        resolve.experience_config(c),
        _advantage(c),
        packer(c, target.config, loss.keeps_groups),
        log_probs,
        scalar.make_scalars(target.config),
    )
    begin_rl = functools.partial(_begin_rl, c, target, optimizer, mesh)
    return Learning(_init(c, target, eagle, begin_rl, mesh), prepare, update, begin_rl, warm_update, frozen)


def _advantage(c: Config) -> Callable[..., advantages.Advantages] | None:
    x, own = c.learner, learner_rules.loss_config(c).parts.advantages
    if own == "pair":
        return functools.partial(advantages.pairs, ties=x.ties)
    if own == "best":
        return functools.partial(advantages.best, ties=x.ties)
    return advantages.raw if own == "reward" else _ADVANTAGES.get(x.advantage)


def _init(
    c: Config, target: Policy, eagle: Eagle | None, begin_rl: Callable[[LearnerState], LearnerState], mesh: jax.sharding.Mesh
) -> Callable[[], LearnerState]:
    """Fresh weights with the optimizer of the first phase, placed as updates return them (else the second step, whose
    inputs are placed otherwise than the first one's, would compile anew)."""
    warm = c.warm_start.steps > 0
    optimizer = make_optimizer(resolve.warm_optimizer_config(c) if warm else resolve.optimizer_config(c))
    path = c.drafter.path
    key = jax.random.fold_in(jax.random.key(c.seed), 1)

    def init() -> LearnerState:
        extra: dict[str, Any] = {}
        if eagle is not None:
            extra["drafter_params"] = saved_drafter.load(path, eagle.config)[1] if path else eagle.init_params(key)
            extra["drafter_optimizer"] = make_optimizer(resolve.drafter_optimizer_config(c))
        params = target.make()
        if c.learner.lora_rank:
            adapters = lora.LoraConfig(c.learner.lora_rank, c.learner.lora_alpha)
            params = lora.init(params, adapters, jax.random.fold_in(jax.random.key(c.seed), 2))
        state = on_mesh(init_state(params, optimizer, **extra), mesh)
        # What RL adds stands in every state, so that a checkpoint of either phase has one form.
        return begin_rl(state)._replace(opt_state=state.opt_state) if warm else begin_rl(state)

    return init


def _begin_rl(c: Config, target: Policy, optimizer: Any, mesh: jax.sharding.Mesh, learner: LearnerState) -> LearnerState:
    """Version 0, an optimizer that has seen no gradient, these weights as the reference and, for PPO, a value model."""
    zero = jnp.zeros_like(learner.version)
    opt_state = on_mesh(optimizer.init(lora.trained(learner.params)), mesh)
    learner = learner._replace(opt_state=opt_state, version=zero, step=jnp.copy(zero))
    if learner_rules.needs_reference(c):
        learner = learner._replace(reference=jax.tree.map(jnp.copy, policy_params(learner)))
    if c.learner.advantage == "gae":
        learner = learner._replace(value=on_mesh(_value_state(c, target, learner), mesh))
    return learner


def _value_state(c: Config, target: Policy, learner: LearnerState) -> LearnerState:
    if c.learner.value_init == "policy":
        params = scalar.from_policy(policy_params(learner), jax.random.fold_in(jax.random.key(c.seed), 3))
    else:
        params = reward_model.load(c.learner.value_init, target.config).params
    return init_state(params, make_optimizer(resolve.value_optimizer_config(c)))


def _value_update(c: Config, config: ModelConfig, mesh: jax.sharding.Mesh) -> Update:
    x = c.learner
    optimizer = make_optimizer(resolve.value_optimizer_config(c))
    return make_value_update(
        config, ValueConfig(x.value_clip), optimizer, mesh, microbatch_rows=x.microbatch_rows, remat=x.remat
    )


def _with_value(policy: Update, value: Update) -> Callable[..., tuple[LearnerState, dict[str, Any]]]:
    """One step of both models on the same batch."""

    def update(learner: LearnerState, batch: PackedBatch) -> tuple[LearnerState, dict[str, Any]]:
        plain = batch._replace(returns=None, values=None)
        learner, metrics = policy(learner, plain)
        # Of the batch the value model reads nothing that only the policy's loss knows.
        bare = batch._replace(proximal=None, proximal_lag=None, reference=None, keep=None)
        own, found = value(learner.value, bare)
        chosen = ("loss", "grad_norm", "explained_variance", "skipped")
        return learner._replace(value=own), metrics | {f"value/{name}": found[name] for name in chosen}

    return update


def on_mesh(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """`tree` on every device of the mesh."""
    return jax.device_put(tree, jax.NamedSharding(mesh, jax.P()))
