"""The jitted policy update: packed rows in, new weights out.

Rows are sharded over the mesh axis `data`, each device walks its rows in microbatches, and numerators, denominators and
gradients are summed: once over microbatches, once over devices. The one division, by the denominator of the whole
optimizer batch, comes last, so the result does not depend on how the batch was split.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adrl_jax.drafter.loss import DrafterLossConfig, packed_drafter_loss
from adrl_jax.learner import losses
from adrl_jax.learner.attention import Reach, reach_of
from adrl_jax.learner.forward import Forward, ForwardConfig, forward
from adrl_jax.learner.losses import Loss, LossConfig
from adrl_jax.learner.optimizer import keep_state
from adrl_jax.models.families import ModelConfig
from adrl_jax.types import PackedBatch

AXIS = "data"

Objective = Callable[[Forward, PackedBatch], Loss]


class LearnerState(NamedTuple):
    """Everything an update changes.

    Attributes:
        params: float32 master weights.
        opt_state: of the policy's optimizer.
        version: int32 scalar, the policy version: updates applied so far (skipped ones do not count).
        step: int32 scalar, updates asked for so far.
        drafter_params, drafter_opt_state: None without a jointly trained drafter.
        drafter_version: int32 scalar, drafter updates applied so far.
    """

    params: Any
    opt_state: Any
    version: jax.Array
    step: jax.Array
    drafter_params: Any
    drafter_opt_state: Any
    drafter_version: jax.Array


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
        opt_state=optimizer.init(params),
        version=jnp.int32(0),
        step=jnp.int32(0),
        drafter_params=drafter_params,
        drafter_opt_state=None if drafter_optimizer is None else drafter_optimizer.init(drafter_params),
        drafter_version=jnp.int32(0),
    )


class _Sums(NamedTuple):
    """What adds up over microbatches and devices."""

    loss: Loss
    grads: Any
    drafter_loss: Loss | None
    drafter_grads: Any


def data_mesh(num_devices: int | None = None) -> jax.sharding.Mesh:
    """A mesh of the first `num_devices` devices (all when None) along the axis `data`.

    Raises:
        ValueError: there are fewer devices.
    """
    devices = jax.devices()
    count = len(devices) if num_devices is None else num_devices
    if not 1 <= count <= len(devices):
        raise ValueError(f"num_devices={num_devices!r} must be between 1 and {len(devices)}, the devices there are")
    return jax.make_mesh((count,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:count])


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
        return self._run(state, batch, self.check(batch))

    def lower(self, state: LearnerState, batch: PackedBatch):
        """The program for these shapes, for ahead-of-time compilation."""
        return self._run.lower(state, batch, self.check(batch))

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


def grpo_objective(config: LossConfig) -> Objective:
    """GRPO over packed rows, with behaviour log-probs from the batch."""

    def objective(out: Forward, batch: PackedBatch) -> Loss:
        rows = jax.vmap(lambda *row: losses.grpo(config, *row))
        return losses.over_rows(
            rows(out.log_probs, out.entropy, batch.log_probs, batch.advantages, batch.target_mask, batch.rollout_index)
        )

    return objective


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
    kernels: str = "xla",
    drafter: DrafterLossConfig | None = None,
    drafter_optimizer: optax.GradientTransformation | None = None,
) -> Update:
    """GRPO's update.

    Args:
        model_config: the policy's.
        loss: clipping, aggregation, entropy bonus.
        optimizer: of the policy, see `optimizer.make_optimizer`.
        mesh: with one axis, `data`.
        microbatch_rows: rows a device holds activations of at one time.
        temperature, valid_vocab, remat, vocab_block, kernels: see `ForwardConfig`.
        drafter: train an EAGLE drafter on the same pass's hidden states.
        drafter_optimizer: required with and only with `drafter`.

    Returns:
        `Update`. Its metrics are float32 scalars: `loss`, `tokens`, `entropy`, `k1`, `k3`, `max_abs_delta`, `ess`,
        `weight_mean`, `clip_frac_high`, `clip_frac_low`, `grad_norm` (before clipping), `skipped`, and with a drafter
        `drafter/loss`, `drafter/feature_loss`, `drafter/token_loss`, `drafter/agreement`, `drafter/grad_norm`,
        `drafter/skipped`.
    """
    return make_objective_update(
        model_config,
        ForwardConfig(temperature, valid_vocab, remat, vocab_block, kernels),
        grpo_objective(loss),
        optimizer,
        mesh,
        microbatch_rows=microbatch_rows,
        entropy_gradient=loss.entropy_coef != 0,
        drafter=drafter,
        drafter_optimizer=drafter_optimizer,
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
) -> Update:
    """An update for any objective over (log-probs, entropy, batch); see `make_update`."""
    if microbatch_rows < 1:
        raise ValueError(f"microbatch_rows={microbatch_rows!r} must be a positive integer")
    if (drafter is None) != (drafter_optimizer is None):
        raise ValueError("drafter and drafter_optimizer go together: give both or neither")
    gradients = make_gradients(
        model_config, config, objective, mesh, microbatch_rows, entropy_gradient=entropy_gradient, drafter=drafter
    )

    def run(state: LearnerState, batch: PackedBatch, reach: Reach):
        sums = gradients(state.params, state.drafter_params, batch, reach)
        params, opt_state, norm, applied = _apply(optimizer, state.params, state.opt_state, sums.loss, sums.grads)
        metrics = losses.metrics(sums.loss) | {"grad_norm": norm, "skipped": 1.0 - applied}
        new = state._replace(
            params=params, opt_state=opt_state, step=state.step + 1, version=state.version + applied.astype(jnp.int32)
        )
        if drafter is not None:
            params, opt_state, norm, applied = _apply(
                drafter_optimizer, state.drafter_params, state.drafter_opt_state, sums.drafter_loss, sums.drafter_grads
            )
            metrics |= _drafter_metrics(sums.drafter_loss, norm, applied)
            new = new._replace(
                drafter_params=params,
                drafter_opt_state=opt_state,
                drafter_version=state.drafter_version + applied.astype(jnp.int32),
            )
        return new, metrics

    return Update(jax.jit(run, static_argnums=2, donate_argnums=0), mesh.shape[AXIS] * microbatch_rows)


def _drafter_metrics(loss: Loss, norm, applied) -> dict[str, jax.Array]:
    n = jnp.maximum(loss.denominator, 1.0)
    out = {f"drafter/{name}": value / n for name, value in loss.sums.items()}
    return out | {"drafter/loss": loss.numerator / n, "drafter/grad_norm": norm, "drafter/skipped": 1.0 - applied}


def _apply(optimizer, params, opt_state, loss: Loss, grads):
    """One optimizer step on grads / denominator; skipped where the batch is empty or anything is not finite."""
    scale = jnp.where(loss.denominator > 0, 1.0 / jnp.maximum(loss.denominator, 1e-30), 0.0)
    grads = jax.tree.map(lambda g: g * scale, grads)
    norm = optax.tree.norm(grads)
    applied = (loss.denominator > 0) & jnp.isfinite(loss.numerator) & jnp.isfinite(norm)
    update = optax.with_extra_args_support(optimizer).update
    updates, new_opt_state = update(grads, opt_state, params, applied=applied)
    params = jax.tree.map(lambda p, u: jnp.where(applied, p + u.astype(p.dtype), p), params, updates)
    return params, keep_state(applied, new_opt_state, opt_state), norm, applied.astype(jnp.float32)


def make_gradients(
    model_config: ModelConfig,
    config: ForwardConfig,
    objective: Objective,
    mesh: jax.sharding.Mesh,
    microbatch_rows: int,
    *,
    entropy_gradient: bool = False,
    drafter: DrafterLossConfig | None = None,
):
    """`gradients(params, drafter_params, batch, reach=None) -> sums`: losses and gradients of numerators over the batch.

    The result is replicated; nothing in it is divided yet. `reach` (see `attention.reach_of`) is static.
    """

    def microbatch_loss(params, drafter_params, batch, reach):
        out = forward(params, model_config, config, batch, reach=reach, entropy_gradient=entropy_gradient)
        loss = objective(out, batch)
        drafter_loss = None
        total = loss.numerator
        if drafter is not None:
            # Both gradients come from one backward pass: the drafter's loss stops at everything that is the target's.
            drafter_loss = packed_drafter_loss(drafter, drafter_params, params, model_config, config, out, batch, reach)
            total = total + drafter_loss.numerator
        return total, (loss, drafter_loss)

    def microbatch(reach, params, drafter_params, batch) -> _Sums:
        grad = jax.grad(microbatch_loss, argnums=(0, 1) if drafter is not None else (0,), has_aux=True)
        grads, (loss, drafter_loss) = grad(params, drafter_params, batch, reach)
        return _Sums(loss, grads[0], drafter_loss, grads[1] if drafter is not None else None)

    def local(params, drafter_params, batch, reach, vary=lambda tree: tree) -> _Sums:
        run = functools.partial(microbatch, reach)
        if batch.token_ids.shape[0] == microbatch_rows:
            return run(params, drafter_params, batch)
        return _accumulate(run, params, drafter_params, batch, microbatch_rows, vary)

    if mesh.size == 1:
        # A sum over one device would still copy every gradient.
        return lambda params, drafter_params, batch, reach=None: local(params, drafter_params, batch, reach)

    def on_device(params, drafter_params, batch, reach) -> _Sums:
        def vary(tree):
            return jax.tree.map(lambda x: jax.lax.pcast(x, AXIS, to="varying"), tree)

        # Weights are marked as differing by device, so that gradients stay local until the one sum.
        params, drafter_params = vary((params, drafter_params))
        return _over_devices(local(params, drafter_params, batch, reach, vary))

    def sharded(params, drafter_params, batch, reach=None) -> _Sums:
        run = functools.partial(on_device, reach=reach)
        specs = (jax.P(), jax.P(), jax.P(AXIS))
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=jax.P())(params, drafter_params, batch)

    return sharded


def _accumulate(microbatch, params, drafter_params, batch, microbatch_rows, vary) -> _Sums:
    split = jax.tree.map(lambda x: x.reshape(-1, microbatch_rows, *x.shape[1:]), batch)
    shapes = jax.eval_shape(microbatch, params, drafter_params, jax.tree.map(lambda x: x[0], split))
    zeros = vary(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))

    def step(sums: _Sums, part: PackedBatch):
        def work(sums):
            return _add(sums, microbatch(params, drafter_params, part))

        # Rows added to fill a bucket hold no target and are not worth a pass.
        return jax.lax.cond(jnp.any(part.target_mask), work, lambda sums: sums, sums), None

    return jax.lax.scan(step, zeros, split)[0]


def _add(a: _Sums, b: _Sums) -> _Sums:
    add = lambda x, y: jax.tree.map(jnp.add, x, y)  # noqa: E731
    return _Sums(
        losses.combine(a.loss, b.loss),
        add(a.grads, b.grads),
        None if a.drafter_loss is None else losses.combine(a.drafter_loss, b.drafter_loss),
        add(a.drafter_grads, b.drafter_grads),
    )


def _over_devices(sums: _Sums) -> _Sums:
    """Sums over the mesh axis: the one place where devices talk."""

    def total(loss):
        if loss is None:
            return None
        summed = jax.lax.psum(loss._replace(maxima={}), AXIS)
        return summed._replace(maxima=jax.lax.pmax(loss.maxima, AXIS))

    return _Sums(
        total(sums.loss), jax.lax.psum(sums.grads, AXIS), total(sums.drafter_loss), jax.lax.psum(sums.drafter_grads, AXIS)
    )


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
        out = forward(params, model_config, config, batch, reach=reach)
        return out.log_probs, out.entropy

    @functools.partial(jax.jit, static_argnums=2)
    def jitted(params, batch, reach):
        if mesh is None or mesh.size == 1:
            return run(params, batch, reach)
        local = functools.partial(run, reach=reach)
        specs = (jax.P(), jax.P(AXIS))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(jax.P(AXIS), jax.P(AXIS)))(params, batch)

    return lambda params, batch: jitted(params, batch, reach_of(batch))
