"""The update: one result for every packing, split, order and number of devices; nothing leaks; nothing bad gets in."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from update_world import (
    ENTROPY,
    LONGEST,
    ONE_LAYER,
    TINY,
    WINDOWED,
    advantages_for,
    assert_same,
    compiled_gradients,
    gradients_of,
    make_rollouts,
    padded,
    params_of,
    plain_logits,
    with_behaviour,
)

from adrl_jax.learner import packing, supervised, update
from adrl_jax.learner.attention import Reach, reach_of
from adrl_jax.learner.forward import ForwardConfig, hidden_states
from adrl_jax.learner.loss_config import LossConfig
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.models.transformer import init_params


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_every_packing_gives_the_same_loss_and_gradient(aggregation):
    params, rollouts = params_of(), make_rollouts()
    rollouts = with_behaviour(TINY, params, rollouts, noise=0.1)
    advantages = advantages_for(rollouts)
    loss = LossConfig(
        clip_low=0.1,
        clip_high=0.15,
        aggregation=aggregation,
        constant_length=8 if aggregation == "constant" else None,
        entropy_coef=0.01,
    )
    reference = gradients_of(TINY, params, padded(rollouts, advantages, rows=12), loss=loss)
    order = np.random.default_rng(3).permutation(len(rollouts))
    for layout in packing.LAYOUTS:
        for row_length, rows in ((LONGEST, 12), (96, 1)):  # the third group needs two of the short rows
            sizes = dict(row_length=row_length, layout=layout, row_multiple=rows)
            batch = packing.pack(rollouts, advantages, **sizes)
            if layout == "prefix_shared" and rows == 1:
                assert batch.token_ids.shape[0] == 1
            assert_same(reference, gradients_of(TINY, params, batch, loss=loss))
            shuffled = packing.pack([rollouts[i] for i in order], [advantages[i] for i in order], **sizes)
            assert_same(reference, gradients_of(TINY, params, shuffled, loss=loss))


@pytest.mark.parametrize("devices,microbatch_rows", [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)])
def test_every_split_gives_the_same_loss_and_gradient(devices, microbatch_rows):
    params, rollouts = params_of(ONE_LAYER), make_rollouts()
    rollouts = with_behaviour(ONE_LAYER, params, rollouts, noise=0.1)
    advantages = advantages_for(rollouts)
    batch = packing.pack(rollouts, advantages, row_length=LONGEST, row_multiple=8)  # some rows are padding
    assert batch.token_ids.shape[0] == 8
    whole = gradients_of(ONE_LAYER, params, batch)
    assert_same(whole, gradients_of(ONE_LAYER, params, batch, devices=devices, microbatch_rows=microbatch_rows))


@pytest.mark.parametrize("groups", [((4, (1, 1, 1)),), ((1, (1,)), (2, (3,))), ((6, (5,)), (6, (5,)))])
def test_one_token_responses_and_single_samples(groups):
    params, rollouts = params_of(), make_rollouts(groups)
    rollouts = with_behaviour(TINY, params, rollouts, noise=0.05)
    advantages = advantages_for(rollouts)
    reference = gradients_of(TINY, params, padded(rollouts, advantages, rows=3))
    batch = packing.pack(rollouts, advantages, row_length=LONGEST, row_multiple=3)
    assert_same(reference, gradients_of(TINY, params, batch))


def test_long_rows_meet_only_the_keys_they_need():
    groups = ((40, (130, 90, 120)), (30, (64, 100, 20)), (9, (140, 60)))
    params, rollouts = params_of(), make_rollouts(groups)
    rollouts = [dataclasses.replace(r, log_probs=r.log_probs * 1.1) for r in rollouts]
    batch = packing.pack(rollouts, advantages_for(rollouts), row_length=640, row_multiple=2)
    reach = reach_of(batch)
    assert reach != Reach()
    step = functools.partial(compiled_gradients(TINY, 2, 1, ENTROPY, 1.0), params, None, batch)
    whole, skipping = step(), step(reach)
    assert_same((float(whole.loss.numerator), whole.grads), (float(skipping.loss.numerator), skipping.grads))


def test_sliding_windows_count_positions_of_the_own_sequence():
    params, rollouts = params_of(WINDOWED), make_rollouts()
    rollouts = with_behaviour(WINDOWED, params, rollouts)
    batch = packing.pack(rollouts, advantages_for(rollouts), row_length=LONGEST, row_multiple=12)
    log_probs, _ = update.make_log_probs(WINDOWED)(params, batch)
    for got, r in zip(packing.unpack_targets(batch, log_probs, len(rollouts)), rollouts, strict=True):
        np.testing.assert_allclose(got, r.log_probs, atol=1e-4)
    reference = gradients_of(WINDOWED, params, padded(rollouts, advantages_for(rollouts), rows=12))
    assert_same(reference, gradients_of(WINDOWED, params, batch))


@pytest.mark.parametrize("layout", packing.LAYOUTS)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_log_probs_equal_a_plain_pass_a_sequence(layout, temperature):
    params, rollouts = params_of(), make_rollouts()
    rollouts = with_behaviour(TINY, params, rollouts, temperature)
    batch = packing.pack(rollouts, advantages_for(rollouts), row_length=40, layout=layout)
    log_probs, _ = update.make_log_probs(TINY, temperature=temperature)(params, batch)
    for got, r in zip(packing.unpack_targets(batch, log_probs, len(rollouts)), rollouts, strict=True):
        assert got.shape == (r.response_length,)
        np.testing.assert_allclose(got, r.log_probs, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0])
def test_first_on_policy_step_has_ratio_one(temperature):
    params, rollouts = params_of(ONE_LAYER), make_rollouts()
    rollouts = with_behaviour(ONE_LAYER, params, rollouts, temperature)
    batch = packing.pack(rollouts, advantages_for(rollouts), row_length=48)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.0))
    step = update.make_update(
        ONE_LAYER, LossConfig(), optimizer, update.data_mesh(1), microbatch_rows=1, temperature=temperature
    )
    before = jax.tree.map(np.array, params)
    state, metrics = step(update.init_state(params, optimizer), batch)
    assert abs(float(metrics["weight_mean"]) - 1) < 1e-4
    assert float(metrics["max_abs_delta"]) < 1e-4
    assert float(metrics["k3"]) < 1e-7
    assert float(metrics["ess"]) > 0.9999
    assert float(metrics["clip_frac_high"]) == float(metrics["clip_frac_low"]) == 0
    jax.tree.map(np.testing.assert_array_equal, before, state.params)
    assert int(state.version) == int(state.step) == 1


def test_stored_log_probs_decide_the_ratio():
    params, rollouts = params_of(ONE_LAYER), with_behaviour(ONE_LAYER, params_of(ONE_LAYER), make_rollouts())
    stale = [dataclasses.replace(r, log_probs=r.log_probs - 1.0) for r in rollouts]
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.0))
    step = update.make_update(ONE_LAYER, LossConfig(), optimizer, update.data_mesh(1), microbatch_rows=1)
    _, metrics = step(update.init_state(params, optimizer), packing.pack(stale, advantages_for(stale), row_length=48))
    np.testing.assert_allclose(float(metrics["weight_mean"]), np.e, rtol=1e-4)
    np.testing.assert_allclose(float(metrics["k1"]), -1.0, rtol=1e-4)
    assert float(metrics["clip_frac_high"]) > 0


def test_segments_do_not_leak():
    params = params_of()
    a, b = make_rollouts(((3, (2,)), (2, (3,))))
    batch = packing.pack([a, b], [1.0, -1.0], row_length=12, layout="plain")
    other = batch._replace(token_ids=np.where(batch.segment_ids == 1, (batch.token_ids + 1) % 97, batch.token_ids))
    inside = np.asarray(batch.segment_ids[0]) == 2
    h, h_other = hidden_states(params, TINY, batch), hidden_states(params, TINY, other)
    np.testing.assert_array_equal(np.asarray(h[0])[inside], np.asarray(h_other[0])[inside])
    assert np.any(np.asarray(h[0])[~inside] != np.asarray(h_other[0])[~inside])

    unique = batch._replace(token_ids=np.arange(12, dtype=np.int32)[None])  # one embedding row a place

    def second_only(embedding):
        hidden = hidden_states(params | {"embedding": embedding}, TINY, unique)
        return jnp.sum(jnp.where(inside[None, :, None], hidden, 0.0) ** 2 * jnp.arange(32))

    gradient = np.asarray(jax.grad(second_only)(params["embedding"]))[:12]
    assert np.all(gradient[~inside] == 0)
    assert np.all(np.any(gradient[inside] != 0, axis=1))


def test_siblings_do_not_leak():
    params = params_of()
    rollouts = make_rollouts(((4, (3, 2, 4)),))
    batch = packing.pack(rollouts, [1.0] * 3, row_length=16)
    second = np.asarray(batch.branch_ids[0]) == 2
    other = batch._replace(token_ids=np.where(second, (batch.token_ids + 1) % 97, batch.token_ids))
    h, h_other = np.asarray(hidden_states(params, TINY, batch)[0]), np.asarray(hidden_states(params, TINY, other)[0])
    real = np.asarray(batch.segment_ids[0]) != 0
    np.testing.assert_array_equal(h[~second & real], h_other[~second & real])
    assert np.all(np.any(h[second] != h_other[second], axis=-1))


def test_padding_is_irrelevant():
    params, rollouts = params_of(ONE_LAYER), with_behaviour(ONE_LAYER, params_of(ONE_LAYER), make_rollouts(), noise=0.1)
    batch = packing.pack(rollouts, advantages_for(rollouts), row_length=48, row_multiple=4)
    real, mask = batch.segment_ids != 0, batch.target_mask
    garbage = batch._replace(
        token_ids=np.where(real, batch.token_ids, 96),
        positions=np.where(real, batch.positions, 11),
        target_ids=np.where(mask, batch.target_ids, 50),
        source_index=np.where(mask, batch.source_index, 31),
        log_probs=np.where(mask, batch.log_probs, 1e9),
        advantages=np.where(mask, batch.advantages, np.nan),
        rollout_index=np.where(mask, batch.rollout_index, 7),
    )
    a, b = gradients_of(ONE_LAYER, params, batch), gradients_of(ONE_LAYER, params, garbage)
    assert a[0] == b[0]
    jax.tree.map(np.testing.assert_array_equal, a[1], b[1])


def test_a_batch_of_padding_changes_nothing_and_is_counted():
    params = params_of(ONE_LAYER)
    before = jax.tree.map(np.array, params)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1.0, weight_decay=0.1))
    step = update.make_update(ONE_LAYER, LossConfig(), optimizer, update.data_mesh(2), microbatch_rows=1)
    state, metrics = step(update.init_state(params, optimizer), packing.empty_batch(4, 16, 8))
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0
    assert float(metrics["skipped"]) == 1
    assert all(np.isfinite(float(v)) for v in metrics.values())
    jax.tree.map(np.testing.assert_array_equal, before, state.params)
    assert (int(state.version), int(state.step)) == (0, 1)

    loss, grads = jax.tree.map(np.asarray, _sums(before, packing.empty_batch(4, 16, 8)))
    assert loss == 0 and all(np.all(g == 0) for g in jax.tree.leaves(grads))


def _sums(params, batch):
    # microbatch_rows = rows: no microbatch is skipped, so the gradient itself must be 0.
    grads = update.make_gradients(ONE_LAYER, ForwardConfig(), update.policy_objective(LossConfig()), update.data_mesh(1), 4)
    sums = jax.jit(grads)(params, None, batch)
    return sums.loss.numerator, sums.grads


def test_non_finite_steps_are_skipped_and_counted():
    params, rollouts = params_of(ONE_LAYER), with_behaviour(ONE_LAYER, params_of(ONE_LAYER), make_rollouts())
    batch = packing.pack(rollouts, advantages_for(rollouts), row_length=48)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1))
    step = update.make_update(ONE_LAYER, LossConfig(), optimizer, update.data_mesh(1), microbatch_rows=1)
    state = update.init_state(params, optimizer)
    state, metrics = step(state, batch)
    assert float(metrics["skipped"]) == 0
    before, bad = jax.tree.map(np.array, state), batch.advantages.copy()
    bad[0, 0] = np.inf
    state, metrics = step(state, batch._replace(advantages=bad))
    assert float(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, before.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, before.opt_state, state.opt_state)
    assert (int(state.version), int(state.step)) == (1, 2)
    state, metrics = step(state, batch)
    assert float(metrics["skipped"]) == 0 and int(state.version) == 2


def test_the_update_is_the_optimizer_on_the_divided_gradient():
    params, rollouts = params_of(ONE_LAYER), with_behaviour(ONE_LAYER, params_of(ONE_LAYER), make_rollouts(), noise=0.1)
    batch = packing.pack(rollouts, advantages_for(rollouts), row_length=48)
    _, grads = gradients_of(ONE_LAYER, params, batch, loss=LossConfig())
    # SGD shows the size of the gradient, which Adam would hide.
    optimizer = optax.sgd(0.5)
    before = jax.tree.map(np.array, params)
    step = update.make_update(ONE_LAYER, LossConfig(), optimizer, update.data_mesh(4), microbatch_rows=1, vocab_block=40)
    batch4 = packing.pack(rollouts, advantages_for(rollouts), row_length=48, row_multiple=4)
    state, metrics = step(update.init_state(params, optimizer), batch4)
    for p, g, new in zip(*map(jax.tree.leaves, (before, grads, state.params)), strict=True):
        np.testing.assert_allclose(new, p - 0.5 * g, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(float(metrics["grad_norm"]), float(optax.tree.norm(grads)), rtol=1e-5)


def test_weights_move_toward_good_responses():
    params, rollouts = params_of(ONE_LAYER, scale=2.0), make_rollouts()
    rollouts = with_behaviour(ONE_LAYER, params, rollouts)
    batch = packing.pack(rollouts, [1.0 if i % 2 else -1.0 for i in range(len(rollouts))], row_length=48)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3))
    step = update.make_update(ONE_LAYER, LossConfig(clip_high=10.0), optimizer, update.data_mesh(1), microbatch_rows=1)
    state = update.init_state(params, optimizer)
    for _ in range(5):
        state, _ = step(state, batch)
    log_probs, _ = update.make_log_probs(ONE_LAYER)(state.params, batch)
    for i, got in enumerate(packing.unpack_targets(batch, log_probs, len(rollouts))):
        assert (np.mean(got - rollouts[i].log_probs) > 0) == (i % 2 == 1)


def test_shapes_are_counted_and_few():
    params = params_of(ONE_LAYER)
    optimizer = make_optimizer(OptimizerConfig())
    step = update.make_update(ONE_LAYER, LossConfig(), optimizer, update.data_mesh(1), microbatch_rows=2)
    state = update.init_state(params, optimizer)
    rng = np.random.default_rng(0)
    for i in range(12):
        groups = [(int(rng.integers(1, 10)), tuple(rng.integers(1, 20, 3))) for _ in range(rng.integers(1, 5))]
        rollouts = make_rollouts(groups, seed=i)
        batch = packing.pack(
            rollouts, advantages_for(rollouts), row_length=64, row_multiple=step.row_multiple, target_multiple=64
        )
        state, _ = step(state, batch)
    assert len(step.shapes) <= 3  # 2, 4 or 6 rows


def test_rows_that_do_not_divide_are_refused():
    optimizer = make_optimizer(OptimizerConfig())
    step = update.make_update(ONE_LAYER, LossConfig(), optimizer, update.data_mesh(2), microbatch_rows=2)
    with pytest.raises(ValueError, match="3 rows, not a multiple of 4"):
        step(update.init_state(params_of(ONE_LAYER), optimizer), packing.empty_batch(3, 8, 4))
    with pytest.raises(ValueError, match="microbatch_rows=0"):
        update.make_update(ONE_LAYER, LossConfig(), optimizer, update.data_mesh(1), microbatch_rows=0)
    with pytest.raises(ValueError, match="num_devices=9"):
        update.data_mesh(9)
    with pytest.raises(ValueError, match="temperature=0"):
        update.make_update(ONE_LAYER, LossConfig(), optimizer, update.data_mesh(1), microbatch_rows=1, temperature=0.0)


def test_supervised_updates_learn_given_responses():
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 97, 4), rng.integers(0, 97, 6)) for _ in range(6)]
    batch = packing.pack(supervised.examples(pairs), [0.0] * 6, row_length=48, layout="plain")
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2))
    step = supervised.make_supervised_update(TINY, optimizer, update.data_mesh(1), microbatch_rows=1)
    params = init_params(TINY, jax.random.key(0))
    expected = np.mean(
        np.concatenate(
            [
                -np.asarray(jax.nn.log_softmax(plain_logits(TINY, params, np.concatenate(p))))[np.arange(3, 9), p[1]]
                for p in pairs
            ]
        )
    )
    state = update.init_state(params, optimizer)
    losses = []
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    assert losses[-1] < 0.1
