"""Options of the update: adapters, learning rate by effective sample size, drafters with a map, other losses on a model."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from update_world import (
    LONGEST,
    ONE_LAYER,
    advantages_for,
    assert_same,
    gradients_of,
    make_rollouts,
    padded,
    params_of,
    with_behaviour,
)

from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.learner import lora, packing, update
from adrl_jax.learner.loss_config import LossConfig
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.speculation import eagle


def rollouts_of(groups=((5, (1, 7)), (3, (6, 2)))):
    return with_behaviour(ONE_LAYER, params_of(ONE_LAYER), make_rollouts(groups), noise=0.2)


LOSSES = [
    LossConfig(surrogate="gspo", aggregation="sequence", clip_low=0.05, clip_high=0.05),
    LossConfig(surrogate="online_dpo", aggregation="group", beta=0.5, kl_coef=0.1),
    LossConfig(old_log_probs="recompute", weight="sequence", weight_high=1.5, mask="geometric", mask_low=0.9, mask_high=1.2),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda c: c.surrogate)
def test_losses_of_responses_and_groups_do_not_depend_on_packing_or_devices(loss):
    params, rollouts = params_of(ONE_LAYER), rollouts_of()
    advantages = [1.0, -1.0, 1.0, -1.0]
    rng = np.random.default_rng(0)
    extra = {
        "reference": [r.log_probs + rng.normal(0, 0.3, r.response_length).astype(np.float32) for r in rollouts],
        "proximal": [r.log_probs + rng.normal(0, 0.1, r.response_length).astype(np.float32) for r in rollouts],
    }

    def with_extra(batch):
        return batch._replace(**{name: packing.scatter_targets(batch, values) for name, values in extra.items()})

    def packed(layout, rows):
        sizes = dict(row_length=LONGEST, row_multiple=rows, together=loss.keeps_groups)
        return with_extra(packing.pack(rollouts, advantages, layout=layout, **sizes))

    plain = packed("plain", 4) if loss.keeps_groups else with_extra(padded(rollouts, advantages, rows=4))
    whole = gradients_of(ONE_LAYER, params, plain, loss=loss)
    assert_same(whole, gradients_of(ONE_LAYER, params, packed("prefix_shared", 4), loss=loss))
    assert_same(whole, gradients_of(ONE_LAYER, params, packed("prefix_shared", 4), devices=2, microbatch_rows=1, loss=loss))


def test_groups_that_must_stay_together_do():
    rollouts = make_rollouts(((5, (6, 7)), (3, (6, 2)), (4, (1, 1))))
    for layout in packing.LAYOUTS:
        batch = packing.pack(rollouts, [0.0] * 6, row_length=24, layout=layout, together=True)
        for group in range(3):
            rows = np.any((batch.group_index == group) & batch.target_mask, axis=1)
            assert rows.sum() == 1
        with pytest.raises(ValueError, match=r"group 0 has .* tokens and must stay in one row, but row_length=16"):
            packing.pack(rollouts, [0.0] * 6, row_length=16, layout=layout, together=True)
    with pytest.raises(ValueError, match=r"values\[0\] has length 5"):
        packing.scatter_targets(batch, [np.zeros(5)] * 6)


def step_of(loss, optimizer, **options):
    return update.make_update(ONE_LAYER, loss, optimizer, update.data_mesh(1), microbatch_rows=1, **options)


def test_adapters_change_nothing_at_first_and_are_all_that_is_trained():
    params, rollouts = params_of(ONE_LAYER), rollouts_of()
    batch = packing.pack(rollouts, advantages_for(rollouts), row_length=48)
    with_adapters = lora.init(params, lora.LoraConfig(rank=2, alpha=4.0), jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, lora.merge(with_adapters), params)
    loss, grads = gradients_of(ONE_LAYER, params, batch, loss=LossConfig())
    before = jax.tree.map(np.array, with_adapters)
    state, metrics = step_of(LossConfig(), optax.sgd(0.5))(update.init_state(with_adapters, optax.sgd(0.5)), batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, state.params["base"], before["base"])
    # b is 0, so only b has a gradient: scale * a^T dW.
    name = "layer_0/attn/o/kernel"
    expected = -0.5 * 2.0 * before["adapters"][name]["a"].T @ grads["layer_0"]["attn"]["o"]["kernel"]
    np.testing.assert_allclose(state.params["adapters"][name]["b"], expected, rtol=1e-4, atol=1e-7)
    merged = update.policy_params(state)["layer_0"]["attn"]["o"]["kernel"]
    a, b = (state.params["adapters"][name][k] for k in ("a", "b"))
    np.testing.assert_allclose(merged, before["base"]["layer_0"]["attn"]["o"]["kernel"] + 2.0 * np.array(a @ b), rtol=1e-5)


def test_adapters_need_few_moments_and_a_rank_below_the_sides():
    params = params_of(ONE_LAYER)
    state = update.init_state(lora.init(params, lora.LoraConfig(2), jax.random.key(0)), make_optimizer(OptimizerConfig()))
    held = sum(x.size for x in jax.tree.leaves(state.opt_state))
    assert held < 0.2 * 2 * sum(x.size for x in jax.tree.leaves(params))
    with pytest.raises(ValueError, match="rank=32 must be below both sides of layer_0"):
        lora.init(params, lora.LoraConfig(32), jax.random.key(0))
    with pytest.raises(ValueError, match="rank=0"):
        lora.LoraConfig(0)


def test_the_learning_rate_shrinks_with_the_effective_sample_size():
    params, rollouts = params_of(ONE_LAYER), rollouts_of()
    batch = packing.pack(rollouts, advantages_for(rollouts), row_length=48)
    before = jax.tree.map(np.array, params)
    moves, sizes = [], []
    for base in (0.0, 1.0):
        step = step_of(LossConfig(), optax.sgd(0.1), ess_base=base)
        state, metrics = step(update.init_state(jax.tree.map(np.array, before), optax.sgd(0.1)), batch)
        moves.append(optax.tree.norm(jax.tree.map(lambda a, b: a - b, state.params, before)))
        sizes.append(metrics)
    ratios = [np.exp(np.sum(r.log_probs * 0)) for r in rollouts]
    assert len(ratios) == 4 and 0 < float(sizes[1]["ess_response"]) < 1
    expected = np.sqrt(float(sizes[1]["ess_response"]))
    np.testing.assert_allclose(float(sizes[1]["lr_scale"]), expected, rtol=1e-5)
    np.testing.assert_allclose(moves[1] / moves[0], expected, rtol=1e-3)


def test_a_drafter_with_a_map_of_ids_learns_and_keeps_its_map():
    params, rollouts = params_of(ONE_LAYER), rollouts_of()
    batch = packing.pack(rollouts, advantages_for(rollouts), row_length=48)
    drafter = eagle.Eagle(ONE_LAYER, draft_vocab_size=40)
    own = drafter.init_params(jax.random.key(1))
    before = jax.tree.map(np.array, own)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2))
    step = step_of(LossConfig(), optimizer, drafter=DrafterLossConfig(), drafter_optimizer=optimizer)
    state = update.init_state(params, optimizer, drafter_params=own, drafter_optimizer=optimizer)
    losses = []
    for _ in range(4):
        state, metrics = step(state, batch)
        losses.append(float(metrics["drafter/loss"]))
    assert losses[-1] < losses[0] and int(state.drafter_version) == 4
    np.testing.assert_array_equal(state.drafter_params[eagle.DRAFT_IDS], before[eagle.DRAFT_IDS])
    assert state.drafter_params[eagle.DRAFT_IDS].dtype == np.int32
    assert not np.array_equal(state.drafter_params["fc"]["kernel"], before["fc"]["kernel"])


def test_what_no_update_touches_comes_back_as_it_was():
    params, rollouts = params_of(ONE_LAYER), rollouts_of()
    batch = packing.pack(rollouts, advantages_for(rollouts), row_length=48)
    optimizer = optax.sgd(0.1)
    reference = jax.tree.map(np.array, params)
    state = update.init_state(params, optimizer)._replace(reference=reference)
    state, _ = step_of(LossConfig(), optimizer)(state, batch)
    assert state.reference is reference


def test_bfloat16_compute_keeps_float32_masters_that_small_steps_move():
    config = dataclasses.replace(ONE_LAYER, dtype="bfloat16")
    params, rollouts = params_of(ONE_LAYER), rollouts_of()
    batch = packing.pack(rollouts, advantages_for(rollouts), row_length=48)
    before = jax.tree.map(np.array, params)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-6))
    step = update.make_update(config, LossConfig(), optimizer, update.data_mesh(1), microbatch_rows=1)
    state, _ = step(update.init_state(params, optimizer), batch)
    kernel = state.params["layer_0"]["attn"]["o"]["kernel"]
    moved = np.abs(np.asarray(kernel) - before["layer_0"]["attn"]["o"]["kernel"])
    assert kernel.dtype == np.float32 and np.median(moved) > 1e-7
