"""The optimizer of policy, drafter or value model: global-norm clip, then AdamW, Adafactor or Muon with a schedule."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "adafactor", "muon")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101), Adafactor (arXiv 1804.04235: factored second moments, no first) or Muon (Jordan et al. 2024:
    orthogonalised momentum on the layers' matrices, Adam on everything else).

    Attributes:
        learning_rate: the peak.
        schedule: after the warm-up: `constant`, or down to 0 at `total_steps` along a line or a half cosine.
        warmup_steps: optimizer steps of linear warm-up; step 0 has 1 / warmup_steps of the peak.
        total_steps: optimizer steps of the run; required unless the schedule is constant.
        weight_decay: decoupled, on matrices only (no norms, no biases).
        clip_norm: largest global gradient norm; None leaves gradients alone.
        name: `adamw`, `adafactor` or `muon`; `b1` and `b2` mean nothing to Adafactor, `b1` is Muon's momentum.
        steps_per_unit: optimizer steps that share one value of the schedule. With more than 1 the schedule counts rollout batches
            and is read after the batch, as the reference code of arXiv 2410.18252 does: its last batch learns at rate 0.
    """

    learning_rate: float = 1e-6
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    name: str = "adamw"
    steps_per_unit: int = 1

    def __post_init__(self):
        if not 0 <= self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate={self.learning_rate!r} must be finite and >= 0")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
        if self.name not in OPTIMIZERS:
            raise ValueError(f"name={self.name!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
        if self.steps_per_unit < 1:
            raise ValueError(f"steps_per_unit={self.steps_per_unit!r} must be a positive integer")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps!r} must be >= 0")
        if self.schedule != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                f"schedule={self.schedule!r} needs total_steps > warmup_steps, got total_steps={self.total_steps!r}, "
                f"warmup_steps={self.warmup_steps!r}"
            )
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be in [0, 1)")
        if not self.eps > 0:
            raise ValueError(f"eps={self.eps!r} must be positive")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay!r} must be >= 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm!r} must be positive, or None for no clipping")


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Optimizer step (0 for the first) to learning rate."""
    schedule = _schedule_of_steps(config)
    k = config.steps_per_unit
    return schedule if k == 1 else lambda step: schedule((step // k + 1) * k)


def _schedule_of_steps(config: OptimizerConfig) -> optax.Schedule:
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "constant":
        main = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        main = optax.linear_schedule(peak, 0.0, config.total_steps - warmup)
    else:
        main = optax.cosine_decay_schedule(peak, config.total_steps - warmup)
    if not warmup:
        return main
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup), main], [warmup])


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales gradients so that their global norm is at most `max_norm`.

    One factor for all leaves, so that it costs no pass over memory of its own (optax divides leaf by leaf).
    """

    def update(grads, state, params=None):
        del params
        factor = jnp.minimum(1.0, max_norm / jnp.maximum(optax.tree.norm(grads), 1e-30))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class AdamState(NamedTuple):
    """Attributes: count int32 `[]`, steps taken; mu, nu: first and second moments, float32, shaped like the params."""

    count: jax.Array
    mu: optax.Updates
    nu: optax.Updates


def scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Adam's direction (arXiv 1412.6980, algorithm 1) with float32 moments, made for donated buffers.

    `update` takes `applied`, bool `[]`: where it is False the state comes back unchanged. Deciding that here, before the
    step is computed from the moments, lets XLA write the moments in place; deciding it later makes it copy them first and
    compute them twice (three times slower on CPU).
    """

    def init(params):
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return AdamState(jnp.zeros([], jnp.int32), zeros, jax.tree.map(jnp.copy, zeros))

    def update(grads, state, params=None, *, applied=True, **unused):
        del params, unused

        def moment(decay, old, fresh):
            return jnp.where(applied, decay * old + (1 - decay) * fresh.astype(jnp.float32), old)

        count = state.count + jnp.asarray(applied, jnp.int32)
        mu = jax.tree.map(lambda g, m: moment(b1, m, g), grads, state.mu)
        nu = jax.tree.map(lambda g, v: moment(b2, v, jnp.square(g.astype(jnp.float32))), grads, state.nu)
        steps_taken = jnp.maximum(count, 1).astype(jnp.float32)
        correct_mu, correct_nu = 1 - b1**steps_taken, 1 - b2**steps_taken
        steps = jax.tree.map(lambda m, v: (m / correct_mu) / (jnp.sqrt(v / correct_nu) + eps), mu, nu)
        return steps, AdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def keep_state(applied: jax.Array, new: optax.OptState, old: optax.OptState) -> optax.OptState:
    """`new` where `applied`, else `old`; Adam's state has seen to that itself."""

    def keep(n, o):
        return n if isinstance(n, AdamState) else jnp.where(applied, n, o)

    return jax.tree.map(keep, new, old, is_leaf=lambda x: isinstance(x, AdamState))


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Global-norm clip and the optimizer; moments are float32 like the master weights."""
    parts = [] if config.clip_norm is None else [clip_by_global_norm(config.clip_norm)]
    rate = make_schedule(config)
    matrices = lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)  # noqa: E731
    if config.name == "adafactor":
        decay = config.weight_decay or None
        parts.append(
            optax.adafactor(rate, multiply_by_parameter_scale=False, weight_decay_rate=decay, weight_decay_mask=matrices)
        )
        return optax.chain(*parts)
    if config.name == "muon":
        parts.append(
            optax.contrib.muon(
                rate,
                beta=config.b1,
                weight_decay=config.weight_decay,
                weight_decay_mask=matrices,
                adam_b1=config.b1,
                adam_b2=config.b2,
                adam_weight_decay=config.weight_decay,
                muon_weight_dimension_numbers=_layer_matrices,
                # Steps as large as Adam's, so that learning rates carry over (Moonlight, arXiv 2502.16982).
                consistent_rms=0.2,
            )
        )
        return optax.chain(*parts)
    parts.append(scale_by_adam(config.b1, config.b2, config.eps))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=matrices))
    return optax.chain(*parts, optax.scale_by_learning_rate(rate))


def _layer_matrices(params: optax.Params) -> optax.Params:
    """Which leaves Muon orthogonalises: `kernel`s of two axes, not the embedding, the output projection or vectors."""

    def choose(path, leaf):
        is_kernel = str(getattr(path[-1], "key", path[-1])) in ("kernel", "a", "b")
        return optax.contrib.MuonDimensionNumbers() if is_kernel and leaf.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(choose, params)
