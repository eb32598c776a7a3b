"""Losses and gradients of packed rows, summed over microbatches and devices before anything is divided.

Rows are sharded over the mesh axis `data`, each device walks its rows in microbatches, and numerators, denominators and
gradients are summed: once over microbatches, once over devices.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.drafter.loss import DrafterLossConfig, packed_drafter_loss
from adrl_jax.learner import losses
from adrl_jax.learner.forward import Forward, ForwardConfig, forward
from adrl_jax.learner.losses import Loss
from adrl_jax.models.families import ModelConfig
from adrl_jax.speculation import eagle
from adrl_jax.types import PackedBatch

AXIS = "data"

Objective = Callable[[Any, PackedBatch], Loss]
"""From what a network says about packed rows (`Forward`, for a policy) to their loss."""


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


class Sums(NamedTuple):
    """What adds up over microbatches and devices: losses, and gradients of their numerators."""

    loss: Loss
    grads: Any
    drafter_loss: Loss | None
    drafter_grads: Any


def make_gradients(
    model_config: ModelConfig,
    config: ForwardConfig,
    objective: Objective,
    mesh: jax.sharding.Mesh,
    microbatch_rows: int,
    *,
    entropy_gradient: bool = False,
    drafter: DrafterLossConfig | None = None,
    network: Callable[..., Any] | None = None,
):
    """`gradients(params, drafter_params, batch, reach=None) -> sums`: losses and gradients of numerators over the batch.

    The result is replicated; nothing in it is divided yet. `reach` (see `attention.reach_of`) is static. Of the drafter's
    parameters those that `eagle.split` calls trained have gradients.

    Args:
        network: `(params, batch, reach=) -> what the objective reads`; None for the policy's `forward`.
    """
    if network is None:

        def network(params, batch, *, reach) -> Forward:
            return forward(params, model_config, config, batch, reach=reach, entropy_gradient=entropy_gradient)

    def microbatch_loss(params, trained, fixed, batch, reach):
        out = network(params, batch, reach=reach)
        loss = objective(out, batch)
        drafter_loss = None
        total = loss.numerator
        if drafter is not None:
            # Both gradients come from one backward pass: the drafter's loss stops at everything that is the target's.
            whole = trained | fixed
            drafter_loss = packed_drafter_loss(drafter, whole, params, model_config, config, out, batch, reach)
            total = total + drafter_loss.numerator
        return total, (loss, drafter_loss)

    def microbatch(reach, params, drafter_params, batch) -> Sums:
        grad = jax.grad(microbatch_loss, argnums=(0, 1) if drafter is not None else (0,), has_aux=True)
        trained, fixed = (None, None) if drafter is None else eagle.split(drafter_params)
        grads, (loss, drafter_loss) = grad(params, trained, fixed, batch, reach)
        return Sums(loss, grads[0], drafter_loss, grads[1] if drafter is not None else None)

    def local(params, drafter_params, batch, reach, vary=lambda tree: tree) -> Sums:
        run = functools.partial(microbatch, reach)
        if batch.token_ids.shape[0] == microbatch_rows:
            return run(params, drafter_params, batch)
        return _accumulate(run, params, drafter_params, batch, microbatch_rows, vary)

    if mesh.size == 1:
        # A sum over one device would still copy every gradient.
        return lambda params, drafter_params, batch, reach=None: local(params, drafter_params, batch, reach)

    def on_device(params, drafter_params, batch, reach) -> Sums:
        def vary(tree):
            return jax.tree.map(lambda x: jax.lax.pcast(x, AXIS, to="varying"), tree)

        # Weights are marked as differing by device, so that gradients stay local until the one sum.
        params, drafter_params = vary((params, drafter_params))
        return _over_devices(local(params, drafter_params, batch, reach, vary))

    def sharded(params, drafter_params, batch, reach=None) -> Sums:
        run = functools.partial(on_device, reach=reach)
        specs = (jax.P(), jax.P(), jax.P(AXIS))
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=jax.P())(params, drafter_params, batch)

    return sharded


def _accumulate(microbatch, params, drafter_params, batch, microbatch_rows, vary) -> Sums:
    split = jax.tree.map(lambda x: x.reshape(-1, microbatch_rows, *x.shape[1:]), batch)
    shapes = jax.eval_shape(microbatch, params, drafter_params, jax.tree.map(lambda x: x[0], split))
    zeros = vary(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))

    def step(sums: Sums, part: PackedBatch):
        def work(sums):
            return _add(sums, microbatch(params, drafter_params, part))

        # Rows added to fill a bucket hold no target and are not worth a pass.
        return jax.lax.cond(jnp.any(part.target_mask), work, lambda sums: sums, sums), None

    return jax.lax.scan(step, zeros, split)[0]


def _add(a: Sums, b: Sums) -> Sums:
    add = lambda x, y: jax.tree.map(jnp.add, x, y)  # noqa: E731
    return Sums(
        losses.combine(a.loss, b.loss),
        add(a.grads, b.grads),
        None if a.drafter_loss is None else losses.combine(a.drafter_loss, b.drafter_loss),
        add(a.drafter_grads, b.drafter_grads),
    )


def _over_devices(sums: Sums) -> Sums:
    """Sums over the mesh axis: the one place where devices talk."""

    def total(loss):
        if loss is None:
            return None
        summed = jax.lax.psum(loss._replace(maxima={}), AXIS)
        return summed._replace(maxima=jax.lax.pmax(loss.maxima, AXIS))

    return Sums(
        total(sums.loss), jax.lax.psum(sums.grads, AXIS), total(sums.drafter_loss), jax.lax.psum(sums.drafter_grads, AXIS)
    )
