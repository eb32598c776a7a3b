"""The jitted policy update: packed rows in, new weights out.

Sums come from `gradients`; the one division, by the denominator of the whole optimizer batch, happens here and comes last, so the
result does not depend on how the batch was split.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.learner import lora, losses
from adrl_jax.learner.attention import Reach, reach_of
from adrl_jax.learner.forward import Forward, ForwardConfig, forward
from adrl_jax.learner.gradients import AXIS, Objective, data_mesh, make_gradients
from adrl_jax.learner.loss_config import LossConfig
from adrl_jax.learner.losses import Loss
from adrl_jax.learner.optimizer import keep_state
from adrl_jax.learner.row import rows_of
from adrl_jax.models.families import ModelConfig
from adrl_jax.speculation import eagle
from adrl_jax.types import PackedBatch

__all__ = [
    "LearnerState",
    "Update",
    "data_mesh",
    "init_state",
    "make_gradients",
    "make_log_probs",
    "make_objective_update",
    "make_update",
    "policy_params",
]


class LearnerState(NamedTuple):
    """Everything an update changes.

    Attributes:
        params: float32 master weights; with LoRA the frozen ones and the adapters, see `lora`.
        opt_state: of the policy's optimizer.
        version: int32 scalar, the policy version: updates applied so far (skipped ones do not count).
        step: int32 scalar, updates asked for so far.
        drafter_params, drafter_opt_state: None without a jointly trained drafter.
        drafter_version: int32 scalar, drafter updates applied so far.
        reference: weights of the frozen reference model, None without one. No update touches them.
        value: the value model's own `LearnerState`, None without one.
    """

    params: Any
    opt_state: Any
    version: jax.Array
    step: jax.Array
    drafter_params: Any
    drafter_opt_state: Any
    drafter_version: jax.Array
    reference: Any = None
    value: Any = None


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    *,
    drafter_params: Any = None,
    drafter_optimizer: optax.GradientTransformation | None = None,
) -> LearnerState:
    """A fresh state at version 0. It takes `params` over: the first update donates their buffers.

    Raises:
        ValueError: only one of `drafter_params` and `drafter_optimizer` is given.
    """
    if (drafter_params is None) != (drafter_optimizer is None):
        raise ValueError("drafter_params and drafter_optimizer go together: give both or neither")
    return LearnerState(
        params=params,
        opt_state=optimizer.init(lora.trained(params)),
        version=jnp.int32(0),
        step=jnp.int32(0),
        drafter_params=drafter_params,
        drafter_opt_state=None if drafter_optimizer is None else drafter_optimizer.init(eagle.split(drafter_params)[0]),
        drafter_version=jnp.int32(0),
    )


def policy_params(state: LearnerState) -> Any:
    """The policy's weights as the model reads them (adapters merged)."""
    return lora.merge(state.params)


class Update:
    """A compiled update, `update(state, batch) -> (state, metrics)`; `state` is donated.

    Attributes:
        shapes: the `(rows, row length, targets, reach)` seen so far; each is one compiled program.
    """

    def __init__(self, run, row_multiple: int):
        self._run = run
        self.row_multiple = row_multiple
        self.shapes: set[tuple[int, int, int, Reach]] = set()

    def __call__(self, state: LearnerState, batch: PackedBatch) -> tuple[LearnerState, dict[str, jax.Array]]:
        # What no update touches stays out of the program.
        new, metrics = self._run(state._replace(reference=None, value=None), batch, self.check(batch))
        return new._replace(reference=state.reference, value=state.value), metrics

    def lower(self, state: LearnerState, batch: PackedBatch):
        """The program for these shapes, for ahead-of-time compilation."""
        return self._run.lower(state._replace(reference=None, value=None), batch, self.check(batch))

    def check(self, batch: PackedBatch) -> Reach:
        """The batch's reach. Raises ValueError where the rows do not divide into devices and microbatches."""
        rows, length = batch.token_ids.shape
        if rows % self.row_multiple:
            raise ValueError(
                f"the batch has {rows} rows, not a multiple of {self.row_multiple} (devices x microbatch_rows); "
                f"pack with row_multiple={self.row_multiple}"
            )
        reach = reach_of(batch)
        self.shapes.add((rows, length, batch.target_ids.shape[1], reach))
        return reach


def policy_objective(config: LossConfig) -> Objective:
    """The composed policy loss over packed rows.

    Raises (when traced):
        ValueError: the batch lacks log-probs that the loss needs.
    """

    def objective(out: Forward, batch: PackedBatch) -> Loss:
        _check_fields(config, batch)
        rows = rows_of(out.log_probs, out.entropy, batch)
        return losses.over_rows(jax.vmap(functools.partial(losses.policy_loss, config))(rows))

    return objective


def _check_fields(config: LossConfig, batch: PackedBatch) -> None:
    needed = {
        "reference": config.needs_reference,
        "proximal": config.needs_proximal,
        "proximal_lag": config.old_log_probs == "interpolate",
        "keep": config.mask == "m2po",
    }
    for name, wanted in needed.items():
        if wanted and getattr(batch, name) is None:
            raise ValueError(f"the loss needs PackedBatch.{name}, which the batch lacks")


def make_update(
    model_config: ModelConfig,
    loss: LossConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    microbatch_rows: int,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    remat: bool = False,
    vocab_block: int | None = None,
    drafter: DrafterLossConfig | None = None,
    drafter_optimizer: optax.GradientTransformation | None = None,
    ess_base: float = 0.0,
) -> Update:
    """The update of the composed policy loss.

    Args:
        model_config: the policy's.
        loss: see `loss_config`.
        optimizer: of the policy, see `optimizer.make_optimizer`.
        mesh: with one axis, `data`.
        microbatch_rows: rows a device holds activations of at one time.
        temperature, valid_vocab, remat, vocab_block: see `ForwardConfig`.
        drafter: train an EAGLE drafter on the same pass's hidden states.
        drafter_optimizer: required with and only with `drafter`.
        ess_base: share of effective responses below which the learning rate shrinks, see `ess_scale`; 0 leaves it alone.

    Returns:
        `Update`. Its metrics are float32 scalars: `loss`, `tokens`, `entropy`, those of `importance.diagnostics`,
        `clip_frac_high`, `clip_frac_low`, `grad_norm` (before clipping), `skipped` (empty or not finite), `nonfinite`, and
        with a drafter
        `drafter/loss`, `drafter/feature_loss`, `drafter/token_loss`, `drafter/agreement`, `drafter/grad_norm`,
        `drafter/skipped`.
    """
    return make_objective_update(
        model_config,
        ForwardConfig(temperature, valid_vocab, remat, vocab_block),
        policy_objective(loss),
        optimizer,
        mesh,
        microbatch_rows=microbatch_rows,
        entropy_gradient=loss.entropy_coef != 0,
        drafter=drafter,
        drafter_optimizer=drafter_optimizer,
        ess_base=ess_base,
    )


def make_objective_update(
    model_config: ModelConfig,
    config: ForwardConfig,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    microbatch_rows: int,
    entropy_gradient: bool = False,
    drafter: DrafterLossConfig | None = None,
    drafter_optimizer: optax.GradientTransformation | None = None,
    ess_base: float = 0.0,
    network: Callable[..., Any] | None = None,
) -> Update:
    """An update for any objective over what `network` (None: the policy's forward pass) says; see `make_update`."""
    if microbatch_rows < 1:
        raise ValueError(f"microbatch_rows={microbatch_rows!r} must be a positive integer")
    if (drafter is None) != (drafter_optimizer is None):
        raise ValueError("drafter and drafter_optimizer go together: give both or neither")
    gradients = make_gradients(
        model_config,
        config,
        objective,
        mesh,
        microbatch_rows,
        entropy_gradient=entropy_gradient,
        drafter=drafter,
        network=network,
    )

    def run(state: LearnerState, batch: PackedBatch, reach: Reach):
        # With LoRA the merged weights are differentiated, and the gradient is pulled back to the adapters once.
        whole, pull_back = lora.merge_for_gradient(state.params)
        sums = gradients(whole, state.drafter_params, batch, reach)
        metrics = losses.metrics(sums.loss)
        size = ess_scale(metrics, ess_base) if ess_base else 1.0
        trained, opt_state, norm, applied, finite = _apply(
            optimizer, lora.trained(state.params), state.opt_state, sums.loss, pull_back(sums.grads), size
        )
        metrics |= {"grad_norm": norm, "skipped": 1.0 - applied, "nonfinite": 1.0 - finite}
        if ess_base:
            metrics["lr_scale"] = size
        new = state._replace(
            params=lora.with_trained(state.params, trained),
            opt_state=opt_state,
            step=state.step + 1,
            version=state.version + applied.astype(jnp.int32),
        )
        if drafter is not None:
            trained, fixed = eagle.split(state.drafter_params)
            trained, opt_state, norm, applied, _ = _apply(
                drafter_optimizer, trained, state.drafter_opt_state, sums.drafter_loss, sums.drafter_grads
            )
            metrics |= _drafter_metrics(sums.drafter_loss, norm, applied)
            new = new._replace(
                drafter_params=trained | fixed,
                drafter_opt_state=opt_state,
                drafter_version=state.drafter_version + applied.astype(jnp.int32),
            )
        return new, metrics

    return Update(jax.jit(run, static_argnums=2, donate_argnums=0), mesh.shape[AXIS] * microbatch_rows)


def ess_scale(metrics: dict[str, jax.Array], base: float) -> jax.Array:
    """VCPO's factor on the learning rate, sqrt(min(1, ESS / n / base)) with ESS over responses; arXiv 2602.17616."""
    return jnp.sqrt(jnp.minimum(1.0, metrics["ess_response"] / base))


def _drafter_metrics(loss: Loss, norm, applied) -> dict[str, jax.Array]:
    n = jnp.maximum(loss.denominator, 1.0)
    out = {f"drafter/{name}": value / n for name, value in loss.sums.items()}
    return out | {"drafter/loss": loss.numerator / n, "drafter/grad_norm": norm, "drafter/skipped": 1.0 - applied}


def _apply(optimizer, params, opt_state, loss: Loss, grads, size=1.0):
    """One optimizer step, times `size`, on grads / denominator; skipped where the batch is empty or anything is not finite."""
    scale = jnp.where(loss.denominator > 0, 1.0 / jnp.maximum(loss.denominator, 1e-30), 0.0)
    grads = jax.tree.map(lambda g: g * scale, grads)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss.numerator) & jnp.isfinite(norm)
    applied = (loss.denominator > 0) & finite
    update = optax.with_extra_args_support(optimizer).update
    updates, new_opt_state = update(grads, opt_state, params, applied=applied)
    if not isinstance(size, float):
        updates = jax.tree.map(lambda u: u * size.astype(u.dtype), updates)
    params = jax.tree.map(lambda p, u: jnp.where(applied, p + u.astype(p.dtype), p), params, updates)
    state = keep_state(applied, new_opt_state, opt_state)
    return params, state, norm, applied.astype(jnp.float32), finite.astype(jnp.float32)


def make_log_probs(
    model_config: ModelConfig,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    vocab_block: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
):
    """`log_probs(params, batch) -> (log_probs, entropy)`, float32 `[M, U]` each: the forward pass alone, jitted.

    Padding targets hold numbers without meaning; mask them. With a `mesh`, rows are sharded over its axis `data`.
    """
    config = ForwardConfig(temperature, valid_vocab, False, vocab_block)

    def run(params, batch, reach):
        out = forward(lora.merge(params), model_config, config, batch, reach=reach)
        return out.log_probs, out.entropy

    @functools.partial(jax.jit, static_argnums=2)
    def jitted(params, batch, reach):
        if mesh is None or mesh.size == 1:
            return run(params, batch, reach)
        local = functools.partial(run, reach=reach)
        specs = (jax.P(), jax.P(AXIS))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(jax.P(AXIS), jax.P(AXIS)))(params, batch)

    return lambda params, batch: jitted(params, batch, reach_of(batch))
