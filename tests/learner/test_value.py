"""The value model: its loss by numpy, its places, and that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_world import LONGEST, ONE_LAYER, make_rollouts, params_of

from adrl_jax.learner import packing, scalar, update, value
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_loss_equals_float64_numpy_in_value_and_gradient(clip):
    rng = np.random.default_rng(0)
    mask = np.array([True] * 6 + [False] * 2)
    old, returns = rng.normal(size=8), rng.normal(size=8)
    now = old + rng.normal(0, 0.3, 8)

    def numpy_loss(v):
        error = (v - returns) ** 2
        if clip:
            error = np.maximum(error, (np.clip(v, old - clip, old + clip) - returns) ** 2)
        return 0.5 * error[mask].mean()

    def ours(v):
        junk = [jnp.where(mask, jnp.asarray(x, jnp.float32), jnp.nan) for x in (old, returns)]
        loss = value.value_loss(value.ValueConfig(clip), v, *junk, jnp.asarray(mask))
        return loss.numerator / loss.denominator

    found, gradient = jax.value_and_grad(ours)(jnp.asarray(now, jnp.float32))
    np.testing.assert_allclose(found, numpy_loss(now), rtol=1e-5)
    expected = [(numpy_loss(now + d) - numpy_loss(now - d)) / 2e-6 for d in np.eye(8) * 1e-6]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    assert np.all(np.asarray(gradient)[~mask] == 0)


def test_scalars_are_read_before_and_after_each_token_in_any_layout():
    rollouts = make_rollouts(((3, (4, 2)), (5, (3,))))
    params = scalar.from_policy(params_of(ONE_LAYER), jax.random.key(0))
    read = scalar.make_scalars(ONE_LAYER)
    found = {}
    for layout in packing.LAYOUTS:
        batch = packing.pack(rollouts, [0.0] * 3, row_length=LONGEST, layout=layout)
        found[layout] = [packing.unpack_targets(batch, x, 3) for x in read(params, batch)]
    for a, b in zip(jax.tree.leaves(found["plain"]), jax.tree.leaves(found["prefix_shared"]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    before, after = found["plain"]
    for b, a in zip(before, after, strict=True):
        np.testing.assert_allclose(b[1:], a[:-1], atol=1e-6)  # after one token is before the next
    np.testing.assert_allclose(before[0][0], before[1][0], atol=1e-6)  # siblings share the prompt's value


def test_it_learns_returns_and_says_how_well():
    rollouts = make_rollouts(((3, (6, 5)), (5, (4,))))
    batch = packing.pack(rollouts, [0.0] * 3, row_length=48)
    returns = [np.full(r.response_length, float(i)) for i, r in enumerate(rollouts)]
    place = lambda values: packing.scatter_targets(batch, values)  # noqa: E731
    batch = batch._replace(returns=place(returns), values=np.zeros(batch.target_mask.shape, np.float32))
    optimizer = make_optimizer(OptimizerConfig(learning_rate=3e-3))
    step = value.make_value_update(ONE_LAYER, value.ValueConfig(0.0), optimizer, update.data_mesh(1), microbatch_rows=1)
    state = update.init_state(scalar.from_policy(params_of(ONE_LAYER, scale=2.0), jax.random.key(0)), optimizer)
    first = None
    for _ in range(60):
        state, metrics = step(state, batch)
        first = float(metrics["loss"]) if first is None else first
    assert float(metrics["loss"]) < 0.2 * first and float(metrics["explained_variance"]) > 0.7


def test_what_is_missing_or_wrong_is_named():
    step = value.make_value_update(
        ONE_LAYER, value.ValueConfig(), make_optimizer(OptimizerConfig()), update.data_mesh(1), microbatch_rows=1
    )
    rollouts = make_rollouts(((3, (2,)),))
    batch = packing.pack(rollouts, [0.0], row_length=LONGEST)
    state = update.init_state(scalar.from_policy(params_of(ONE_LAYER), jax.random.key(0)), make_optimizer(OptimizerConfig()))
    with pytest.raises(ValueError, match=r"PackedBatch.returns"):
        step(state, batch)
    with pytest.raises(ValueError, match="clip=-1"):
        value.ValueConfig(-1)
