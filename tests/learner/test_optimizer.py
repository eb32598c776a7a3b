"""The optimizer: schedule in optimizer steps, decay on matrices only, float32 masters that small steps move."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from adrl_jax.learner import optimizer
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer, make_schedule


def test_schedules_at_every_step():
    warm = make_schedule(OptimizerConfig(1.0, "linear", warmup_steps=4, total_steps=8))
    np.testing.assert_allclose([warm(s) for s in range(9)], [0.25, 0.4375, 0.625, 0.8125, 1, 0.75, 0.5, 0.25, 0])
    np.testing.assert_allclose([make_schedule(OptimizerConfig(2.0))(s) for s in (0, 100)], [2.0, 2.0])
    cosine = make_schedule(OptimizerConfig(1.0, "cosine", total_steps=10))
    np.testing.assert_allclose([cosine(s) for s in (0, 5, 10)], [1.0, 0.5, 0.0], atol=1e-7)


def test_the_first_step_by_hand():
    config = OptimizerConfig(0.1, weight_decay=0.5, clip_norm=None)
    optimizer = make_optimizer(config)
    params = {"kernel": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    grads = {"kernel": jnp.full((2, 2), 3.0), "norm": jnp.full(2, -3.0)}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # Adam's first step has size 1; decay 0.5 touches the matrix only.
    np.testing.assert_allclose(updates["kernel"], -0.1 * (1 + 0.5), rtol=1e-5)
    np.testing.assert_allclose(updates["norm"], 0.1, rtol=1e-5)


def test_clipping_is_global():
    optimizer = make_optimizer(OptimizerConfig(1.0, b1=0.0, b2=0.0, eps=1e8, clip_norm=1.0))
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    grads = {"a": jnp.array([30.0]), "b": jnp.array([40.0])}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # With a huge epsilon Adam is gradient / epsilon, so the clipped gradient shows: (0.6, 0.8).
    np.testing.assert_allclose([updates["a"][0] * -1e8, updates["b"][0] * -1e8], [0.6, 0.8], rtol=1e-5)


def test_small_steps_move_float32_masters():
    optimizer = make_optimizer(OptimizerConfig(1e-6))
    params = jnp.ones((1, 1))
    updates, _ = optimizer.update(jnp.ones((1, 1)), optimizer.init(params), params)
    new = optax.apply_updates(params, updates)
    assert new.dtype == jnp.float32 and float(new[0, 0]) < 1.0


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(learning_rate=-1.0), "learning_rate=-1.0"),
        (dict(learning_rate=float("nan")), "learning_rate=nan"),
        (dict(schedule="step"), "schedule='step' is unknown; choose one of constant, linear, cosine"),
        (dict(schedule="linear"), "needs total_steps > warmup_steps"),
        (dict(schedule="linear", warmup_steps=5, total_steps=5), "needs total_steps > warmup_steps"),
        (dict(warmup_steps=-1), "warmup_steps=-1"),
        (dict(b1=1.0), "b1=1.0"),
        (dict(eps=0.0), "eps=0.0"),
        (dict(weight_decay=-0.1), "weight_decay=-0.1"),
        (dict(clip_norm=0.0), "clip_norm=0.0"),
    ],
)
def test_bad_configs_name_field_and_value(fields, message):
    with pytest.raises(ValueError) as error:
        OptimizerConfig(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize("name", optimizer.OPTIMIZERS)
def test_every_optimizer_lowers_a_quadratic_and_can_skip_a_step(name):
    target = {"layer": {"kernel": jnp.arange(12.0).reshape(3, 4) / 6}, "embedding": jnp.ones((5, 3)), "norm": jnp.ones(4)}
    params = jax.tree.map(jnp.zeros_like, target)
    made = make_optimizer(OptimizerConfig(learning_rate=0.05, name=name, weight_decay=1e-4))
    state = made.init(params)
    loss = lambda p: sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(target)))  # noqa: E731
    start = float(loss(params))
    step = jax.jit(optax.with_extra_args_support(made).update)
    for _ in range(60):
        updates, state = step(jax.grad(loss)(params), state, params, applied=True)
        params = optax.apply_updates(params, updates)
    # Muon moves all singular values of a matrix alike, so the smallest are long done when the largest arrives.
    assert float(loss(params)) < (0.3 if name == "muon" else 0.1) * start
    _, after = step(jax.tree.map(lambda x: x * jnp.nan, params), state, params, applied=False)
    kept = optimizer.keep_state(jnp.array(False), after, state)
    jax.tree.map(np.testing.assert_array_equal, kept, state)


def test_muon_orthogonalises_the_layers_matrices_alone():
    params = {"layer_0": {"o": {"kernel": jnp.eye(4) * 3}}, "embedding": jnp.ones((6, 4)), "norm": jnp.ones(4)}
    chosen = optimizer._layer_matrices(params)
    assert chosen["layer_0"]["o"]["kernel"] is not None and chosen["embedding"] is None and chosen["norm"] is None


def test_a_schedule_by_batches_is_the_reference_codes():
    # 4 batches of 2 updates: factors .75, .5, .25 and 0, so the last quarter of the updates does nothing.
    c = OptimizerConfig(learning_rate=1.0, schedule="linear", total_steps=8, steps_per_unit=2)
    np.testing.assert_allclose([make_schedule(c)(i) for i in range(8)], [0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0, 0], atol=1e-6)
    by_update = OptimizerConfig(learning_rate=1.0, schedule="linear", total_steps=8)
    np.testing.assert_allclose([make_schedule(by_update)(i) for i in range(8)], 1 - np.arange(8) / 8, atol=1e-6)
