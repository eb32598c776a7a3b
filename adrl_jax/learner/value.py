"""The value model of PPO: its loss and its update, on the same packed rows as the policy's.

It is a `scalar` model with a state and an optimizer of its own; the value of a token's state is the scalar before it.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import optax

from adrl_jax.learner import losses
from adrl_jax.learner.forward import ForwardConfig
from adrl_jax.learner.losses import Loss
from adrl_jax.learner.scalar import scalars
from adrl_jax.learner.update import Update, make_objective_update
from adrl_jax.models.families import ModelConfig
from adrl_jax.types import PackedBatch


@dataclasses.dataclass(frozen=True)
class ValueConfig:
    """Attributes: clip, how far a value may move from the one before in one batch (PPO's value clip); 0 for no bound."""

    clip: float = 0.2

    def __post_init__(self):
        if not 0 <= self.clip < float("inf"):
            raise ValueError(f"clip={self.clip!r} must be finite and >= 0 (0: no bound)")


def value_loss(config: ValueConfig, values, old, returns, mask) -> Loss:
    """1/2 max((v - R)^2, (clip(v, old - c, old + c) - R)^2) over one row, `[U]` each, mean over tokens of the batch."""
    chex.assert_equal_shape([values, old, returns, mask])
    values, old, returns = (jnp.where(mask, x, 0.0) for x in (values, old, returns))
    error = jnp.square(values - returns)
    if config.clip:
        bounded = jnp.clip(values, old - config.clip, old + config.clip)
        error = jnp.maximum(error, jnp.square(bounded - returns))
    count = jnp.sum(mask, dtype=jnp.float32)
    sums = {
        "tokens": count,
        "returns": jnp.sum(returns),
        "returns_squared": jnp.sum(jnp.square(returns)),
        "residual": jnp.sum(returns - values),
        "residual_squared": jnp.sum(jnp.square(returns - values)),
        "entropy": jnp.float32(0.0),
    }
    return Loss(0.5 * jnp.sum(jnp.where(mask, error, 0.0)), count, jax.lax.stop_gradient(sums), {})


def make_value_update(
    model_config: ModelConfig,
    config: ValueConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    microbatch_rows: int,
    remat: bool = False,
) -> Update:
    """`update(state, batch) -> (state, metrics)` for a batch with `returns` and `values`; `state.params` is a scalar model's."""

    def objective(out, batch: PackedBatch) -> Loss:
        if batch.returns is None or batch.values is None:
            raise ValueError("the value loss needs PackedBatch.returns and PackedBatch.values, which the batch lacks")
        rows = jax.vmap(functools.partial(value_loss, config))(out[0], batch.values, batch.returns, batch.target_mask)
        return losses.over_rows(rows)

    def network(params, batch, *, reach):
        return scalars(params, batch, config=model_config, reach=reach, remat=remat)

    return make_objective_update(
        model_config, ForwardConfig(), objective, optimizer, mesh, microbatch_rows=microbatch_rows, network=network
    )
