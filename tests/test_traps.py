"""Each known fault of the list in traps.py is a test that exists, or cannot be made; and those tests that have no other home."""

import dataclasses
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traps import TRAPS

from adrl_jax.learner import advantages, losses, packing, surrogates, weights
from adrl_jax.learner.loss_config import LossConfig
from adrl_jax.learner.row import Row
from adrl_jax.rewards.math import score_number
from adrl_jax.types import FinishReason, Rollout, SamplingParams

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS / "learner"))
from loss_world import CONFIGS, by_response, for_config, responses  # noqa: E402


def test_every_trap_is_a_test_that_exists_or_says_why_it_cannot_be():
    known = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    for key, trap in TRAPS.items():
        assert bool(trap.tests) != bool(trap.impossible), key
        for name in trap.tests:
            assert name in known, f"{key}: no test {name}"


# Faults whose tests have no other home.


def rollout_of(ids, prompt_length, reason=FinishReason.STOP, **fields):
    r = len(ids) - prompt_length
    facts = {"log_probs": np.full(r, -1.0, np.float32), "policy_versions": np.zeros(r, np.int32)} | fields
    return Rollout(
        0, 0, 0, 0, np.array(ids, np.int32), prompt_length, r, finish_reason=reason, sampling=SamplingParams(), **facts
    )


def row_of(log_ratio, advantages_, **fields):
    delta = jnp.asarray(log_ratio, jnp.float32)
    zeros = jnp.zeros(delta.shape, jnp.int32)
    advantages_ = jnp.broadcast_to(jnp.asarray(advantages_, jnp.float32), delta.shape)
    return Row(delta, 0 * delta, 0 * delta, advantages_, zeros == 0, zeros, zeros, zeros)._replace(**fields)


def test_the_end_token_is_trained_where_it_is_also_the_pad():
    # Pad and end are 2, and the prompt holds one too.
    rollout = rollout_of([7, 2, 5, 9, 2], 2)
    batch = packing.pack([rollout], [1.0], row_length=8, target_multiple=5)
    np.testing.assert_array_equal(batch.target_mask[0], [True, True, True, False, False])
    np.testing.assert_array_equal(batch.target_ids[0, :3], [5, 9, 2])


def test_only_sampled_tokens_are_trained():
    rollouts = [rollout_of([7, 2, 5, 9, 2], 2), rollout_of([1, 4, 4, 4], 1)]
    for layout in packing.LAYOUTS:
        groups = [dataclasses.replace(r, group_id=i) for i, r in enumerate(rollouts)]
        batch = packing.pack(groups, [1.0, 1.0], row_length=16, layout=layout)
        places = batch.target_index[batch.target_mask]
        assert len(places) == 3 + 3 and np.all(batch.branch_ids[0, places] > 0)  # never a prompt token


def test_missing_ends_are_facts_of_the_response():
    ended, cut = rollout_of([2, 2, 5, 2], 2), rollout_of([2, 2, 5, 9], 2, FinishReason.LENGTH)
    assert not ended.truncated and cut.truncated


def test_a_rollout_refuses_lengths_that_disagree():
    for name in ("log_probs", "policy_versions"):
        with pytest.raises(ValueError, match=f"Rollout.{name} has length 2, expected 3"):
            rollout_of([7, 2, 5, 9, 2], 2, **{name: np.zeros(2)})


def test_the_rule_of_a_sequence_weight_is_its_name():
    # 8,000 tokens, each log-ratio -0.00035: the mean rule gives 0.99965, the sum rule 0.0608.
    row = row_of(np.full(8000, -0.00035), 1.0)
    got = {}
    for level in ("geometric", "sequence"):
        config = LossConfig(surrogate="reinforce", weight=level, weight_high=0.0)
        got[level] = float(weights.WEIGHTS[level].function(config, row)[0])
    assert got["geometric"] == pytest.approx(0.99965, abs=1e-5) and got["sequence"] == pytest.approx(0.0608, abs=1e-4)


def test_shapes_that_disagree_are_refused():
    # Three responses of three tokens: a loss a response would broadcast against a weight a token without a word.
    row = row_of(np.zeros(9), np.zeros(9))
    with pytest.raises(AssertionError):
        losses.policy_loss(LossConfig(), row._replace(advantages=jnp.zeros(3)))
    with pytest.raises(AssertionError):
        losses.policy_loss(LossConfig(), row._replace(advantages=jnp.zeros((3, 3))))
    for surrogate in surrogates.SURROGATES.values():
        config = LossConfig(
            surrogate=next(k for k, v in surrogates.SURROGATES.items() if v is surrogate),
            aggregation={"token": "token", "sequence": "sequence", "group": "group"}[surrogate.level],
        )
        assert surrogate.function(config, row._replace(reference=jnp.zeros(9))).value.shape == (9,)


def test_stored_behaviour_log_probs_matter():
    names = ("grpo", "gspo", "topr", "reinforce", "online_dpo", "decoupled", "token tis", "aipo", "icepop", "opsm")
    for name in names:
        config = CONFIGS[name]
        chosen = for_config(config, responses())
        moved = [dataclasses.replace(r, behaviour=r.behaviour + 0.1) for r in chosen]
        before, after = by_response(config, chosen), by_response(config, moved)
        same = before[0] == after[0] and np.array_equal(before[1], after[1])
        # On-policy losses by definition, and those that are off-policy without looking at mu.
        blind = config.weight == config.mask == "none" and (config.old_log_probs == "recompute" or not config.parts.has_ratio)
        assert same == blind, name


def test_what_a_mask_leaves_out_is_still_counted():
    config = LossConfig(mask="token", mask_low=0.9, mask_high=1.1)
    half = losses.policy_loss(config, row_of([0.0, 0.0, 0.5, -0.5], 1.0))
    assert float(half.numerator) == -2.0 and float(half.denominator) == 4.0
    none, gradient = jax.value_and_grad(lambda d: losses.policy_loss(config, row_of(d, 1.0)).numerator)(jnp.full(4, 0.5))
    assert float(none) == 0 and np.all(np.asarray(gradient) == 0)


def test_metrics_do_not_depend_on_what_is_masked():
    plain, masked = (
        losses.metrics(losses.policy_loss(config, row_of([0.0, 0.0, 0.5, -0.5], 1.0)))
        for config in (LossConfig(), LossConfig(mask="token", mask_low=0.9, mask_high=1.1))
    )
    for name in ("tokens", "k1", "k3", "ess", "weight_mean", "max_abs_delta"):
        assert float(plain[name]) == float(masked[name])
    assert float(masked["masked_share"]) == 0.5


def test_an_answer_far_from_the_end_counts():
    text = "2+40=42\n#### 42\n" + "and so on, as said before. " * 18
    assert score_number(text, 42, mode="flexible", truncated=False).value == 1.0


def test_several_boxes_are_not_glued():
    assert score_number(r"so \boxed{840}. **Final Answer** \boxed{840}", 840, mode="flexible", truncated=False).value == 1.0


def test_an_unfinished_box_earns_nothing():
    for text in (r"\boxed{7} no, wait \boxed{", r"\boxed{}"):
        assert score_number(text, 7, mode="flexible", truncated=False).value == 0.0


def test_raw_rewards_are_the_surrogates_own_business():
    np.testing.assert_array_equal(advantages.raw([2.0, 5.0], [0, 0]).values, [2, 5])
