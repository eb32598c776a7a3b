"""The optimizer of policy or drafter: global-norm clip, then AdamW with a schedule in optimizer steps."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101).

    Attributes:
        learning_rate: the peak.
        schedule: after the warm-up: `constant`, or down to 0 at `total_steps` along a line or a half cosine.
        warmup_steps: optimizer steps of linear warm-up; step 0 has 1 / warmup_steps of the peak.
        total_steps: optimizer steps of the run; required unless the schedule is constant.
        weight_decay: decoupled, on matrices only (no norms, no biases).
        clip_norm: largest global gradient norm; None leaves gradients alone.
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

    def __post_init__(self):
        if not 0 <= self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate={self.learning_rate!r} must be finite and >= 0")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
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
    """Global-norm clip and AdamW; moments are float32 like the master weights."""
    parts = [] if config.clip_norm is None else [clip_by_global_norm(config.clip_norm)]
    parts.append(scale_by_adam(config.b1, config.b2, config.eps))
    if config.weight_decay:
        matrices = lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)  # noqa: E731
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=matrices))
    return optax.chain(*parts, optax.scale_by_learning_rate(make_schedule(config)))
