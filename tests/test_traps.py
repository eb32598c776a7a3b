"""What people trip over when they train language models with RL: each known fault of the learner's side is a test, or cannot be written.

Two kinds of entries: `tests` names the tests that would fail if the fault were made; `impossible` says why it cannot be. The ids are those of
our list of public faults (letters for the general ones, numbers for off-policy and asynchronous learning). What
belongs to queues and threads is tested with them in tests/runtime.
"""

import dataclasses
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.learner import advantages, losses, packing, surrogates, weights
from adrl_jax.learner.loss_config import LossConfig
from adrl_jax.learner.row import Row
from adrl_jax.rewards.math import score_number
from adrl_jax.types import FinishReason, Rollout, SamplingParams

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS / "learner"))
from loss_world import CONFIGS, by_response, for_config, responses  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Trap:
    """Attributes: fault in a few words; tests, names of functions below tests/; impossible, why it cannot be made."""

    fault: str
    tests: tuple[str, ...] = ()
    impossible: str = ""


TRAPS = {
    # Learner.
    "L-01": Trap(
        "temperature ignored in log-probs", ("test_first_on_policy_step_has_ratio_one", "test_a_wrong_temperature_shows")
    ),
    "L-02": Trap(
        "means of means",
        ("test_every_split_gives_the_same_loss_and_gradient", "test_aggregation_by_hand", "test_eight_devices_by_hand"),
    ),
    "L-03": Trap("normalised over the batch", ("test_normalised_within_each_group",)),
    "L-04": Trap("groups of equal rewards", ("test_equal_rewards_give_exactly_zero", "test_sample_deviation_is_used")),
    "L-06": Trap("leave-one-out over the wrong axis", ("test_leave_one_out_by_hand", "test_groups_go_by_id_not_by_place")),
    "L-07": Trap("terminal reward on a pad", ("test_a_value_model_gives_token_advantages",)),
    "L-09": Trap("cut-off taken for an end", ("test_a_cut_off_response_by_hand", "test_a_value_model_gives_token_advantages")),
    "L-10": Trap(
        "end token looked for in the prompt",
        ("test_missing_ends_are_facts_of_the_response", "test_penalties_reach_the_advantages"),
    ),
    "L-12": Trap("KL of another sign", ("test_kl_estimates_by_hand", "test_a_small_step_brings_the_policy_to_the_reference")),
    "L-13": Trap(
        "ratio to recomputed log-probs hides staleness",
        ("test_stored_log_probs_decide_the_ratio", "test_stale_data_with_recomputed_log_probs_need_a_weight"),
    ),
    "L-14": Trap("sum where the mean was meant", ("test_the_rule_of_a_sequence_weight_is_its_name",)),
    "L-16": Trap("broadcast of sequence loss and token weight", ("test_shapes_that_disagree_are_refused",)),
    "L-17": Trap(
        "nothing left to train on",
        ("test_a_batch_of_padding_gives_zero_and_finite_gradients", "test_a_batch_of_padding_changes_nothing_and_is_counted"),
    ),
    "L-19": Trap("bfloat16 log-softmax", ("test_bfloat16_hidden_states_meet_a_float32_softmax",)),
    "L-20": Trap(
        "a worker's error is lost",
        ("test_a_scorer_that_raises_ends_the_run_with_its_own_error", "test_the_scorers_own_exception_ends_the_batch"),
    ),
    "L-21": Trap(
        "meaning of a staleness limit",
        impossible="in the synchronous loop data are never older than the batch; limits are tests/runtime's",
    ),
    "L-23": Trap(
        "micro-steps counted as steps",
        impossible="there is one counter of rollout batches; microbatches live inside one compiled update",
    ),
    "L-24": Trap(
        "schedule and accumulation disagree",
        (
            "test_schedules_at_every_step",
            "test_a_schedule_by_batches_is_the_reference_codes",
            "test_every_split_gives_the_same_loss_and_gradient",
        ),
    ),
    # Packing.
    "P-01": Trap("packed samples see each other", ("test_segments_do_not_leak", "test_siblings_do_not_leak")),
    "P-02": Trap("log-probs one short", ("test_log_probs_equal_a_plain_pass_a_sequence",)),
    "P-03": Trap(
        "loss changes with the layout",
        ("test_every_packing_gives_the_same_loss_and_gradient", "test_one_result_for_every_layout_order_and_split"),
    ),
    "P-05": Trap("a row that sees nothing is NaN", ("test_rows_of_padding_are_finite",)),
    "P-06": Trap(
        "segments taken for a 0/1 mask",
        ("test_equals_dense_attention_in_value_and_gradient", "test_the_reach_covers_every_visible_key"),
    ),
    "P-08": Trap("every length compiles", ("test_shapes_are_counted_and_few",)),
    # Data and rewards.
    "A-01": Trap("formats of numbers", ("test_reads_exactly", "test_numbers")),
    "A-02": Trap("only the last characters searched", ("test_an_answer_far_from_the_end_counts",)),
    "A-04": Trap("boxed answers glued together", ("test_braces_are_balanced", "test_several_boxes_are_not_glued")),
    "A-05": Trap("an unfinished box", ("test_an_unfinished_box_earns_nothing", "test_senseless_tolerance_is_an_error")),
    "A-07": Trap("different answers judged equal", ("test_expressions",)),
    "A-08": Trap(
        "time-outs off the main thread",
        (
            "test_scores_the_same_in_a_thread_as_in_the_main_thread",
            "test_a_hanging_scorer_is_killed_and_counted_and_the_next_20_are_served",
        ),
    ),
    "A-09": Trap(
        "unreadable reference is worth 1",
        ("test_an_unreadable_reference_is_never_worth_1", "test_unusable_rewards_drop_their_response_and_not_the_batch"),
    ),
    "A-11": Trap("one answer style", ("test_mode_decides_which_styles_count", "test_mode_is_the_users_choice")),
    "A-12": Trap("the solution for the number", ("test_references_are_final_numbers", "test_reference_text")),
    "A-13": Trap("pad is the end token", ("test_the_end_token_is_trained_where_it_is_also_the_pad",)),
    "A-15": Trap(
        "assistant masks", impossible="targets are the response's places, from its length; no mask is read from a template"
    ),
    "A-16": Trap(
        "ids past the table",
        ("test_ids_past_the_tokenizer_are_never_drawn", "test_bad_requests_are_refused_before_anything_compiles"),
    ),
    # Off-policy: denominators and aggregation.
    "1": Trap("denominator of another batch", ("test_every_split_gives_the_same_loss_and_gradient",)),
    "2": Trap("divided twice", ("test_the_update_is_the_optimizer_on_the_divided_gradient",)),
    "3": Trap(
        "short micro-batches weigh as much", ("test_every_split_gives_the_same_loss_and_gradient", "test_eight_devices_by_hand")
    ),
    "5": Trap("dummy rows counted", ("test_padding_is_irrelevant", "test_padding_is_irrelevant_and_has_no_gradient")),
    "6": Trap(
        "rejected rows and the denominator",
        ("test_what_a_mask_leaves_out_is_still_counted", "test_what_is_dropped_shapes_no_baseline"),
    ),
    "7": Trap("a packed row taken for one sequence", ("test_one_result_for_every_layout_order_and_split",)),
    "9": Trap(
        "statistics by shard",
        impossible="advantages are computed on the host over the whole batch, before any device sees a row",
    ),
    "10": Trap(
        "one valid token", ("test_whitening_is_over_tokens_and_finite", "test_batch_normalised_is_finite_with_few_rewards")
    ),
    # Rewards and groups.
    "11": Trap(
        "one NaN reward",
        ("test_nan_rewards_carry_no_weight", "test_a_reward_that_is_no_number_costs_one_response_and_not_the_run"),
    ),
    "13": Trap("groups by place", ("test_groups_go_by_id_not_by_place",)),
    "14": Trap(
        "rejected samples in the baseline",
        ("test_rejected_samples_shape_no_baseline", "test_what_is_dropped_shapes_no_baseline"),
    ),
    "15": Trap("ties", ("test_pairs_and_best_by_hand_and_ties", "test_pairs_share_a_row_and_ties_are_skipped_and_counted")),
    # Ratios and log-probs.
    "17": Trap("behaviour log-probs without effect", ("test_stored_behaviour_log_probs_matter",)),
    "18": Trap(
        "stale data as if on-policy",
        ("test_stored_log_probs_decide_the_ratio", "test_stale_data_with_recomputed_log_probs_need_a_weight"),
    ),
    "19": Trap("temperature", ("test_first_on_policy_step_has_ratio_one",)),
    "21": Trap("filters renormalise", ("test_rules_between_fields",)),
    "22": Trap(
        "model state between reference and policy",
        impossible="parameters are arguments of pure functions; a pass leaves nothing behind",
    ),
    "23": Trap("dropout", impossible="no module has dropout or a mode; two passes are one function of the same arguments"),
    "25": Trap("prompt tokens trained", ("test_only_sampled_tokens_are_trained",)),
    "26": Trap("text encoded again", ("test_behaviour_log_probs_are_the_learners",)),
    "27": Trap("missing log-probs padded", ("test_a_rollout_refuses_lengths_that_disagree",)),
    "29": Trap(
        "positions and pads",
        ("test_log_probs_equal_a_plain_pass_a_sequence", "test_the_end_token_is_trained_where_it_is_also_the_pad"),
    ),
    # KL and reference.
    "30": Trap("KL pushes away", ("test_a_small_step_brings_the_policy_to_the_reference",)),
    "31": Trap(
        "estimators without gradient or with another's",
        (
            "test_corrected_forms_have_the_gradient_of_the_kl_wherever_tokens_came_from",
            "test_what_the_uncorrected_forms_do_on_policy",
        ),
    ),
    "33": Trap(
        "a knob without effect",
        ("test_every_knob_that_is_accepted_acts", "test_what_does_not_go_together_is_refused_and_both_fields_named"),
    ),
    # End and truncation.
    "34": Trap("end masked as pad", ("test_the_end_token_is_trained_where_it_is_also_the_pad",)),
    "35": Trap("a second end token", ("test_rows_end_both_ways",)),
    "37": Trap("metrics read masks after they were zeroed", ("test_metrics_do_not_depend_on_what_is_masked",)),
    "38": Trap("replace or subtract", ("test_replace_and_subtract_are_not_the_same",)),
    # Weights, caches, staleness.
    "39": Trap("adapters never delivered", ("test_adapters_change_nothing_at_first_and_are_all_that_is_trained",)),
    "41": Trap(
        "first rollouts with old weights",
        impossible="the synchronous loop publishes before every round; other modes: tests/runtime",
    ),
    "42": Trap("caches of old weights", ("test_new_weights_leave_nothing_behind",)),
    "43": Trap("live references", ("test_snapshot_survives_donation_of_the_learners_buffers",)),
    "45": Trap(
        "long answers thrown away", impossible="every request drawn is learnt from or counted as dropped; queues: tests/runtime"
    ),
    "46": Trap(
        "staleness limit off by one",
        impossible="there is no limit in the synchronous loop: ages are the mini-batches before; queues: tests/runtime",
    ),
    "47": Trap(
        "a worker's error never arrives",
        ("test_the_scorers_own_exception_ends_the_batch", "test_a_worker_that_dies_ends_the_batch_by_default"),
    ),
    "49": Trap("a blocked event loop", impossible="there is no event loop; heartbeats of threads: tests/runtime"),
    "50": Trap(
        "data order after a resume",
        ("test_going_on_from_a_saved_state_is_the_unbroken_run", "test_an_epoch_that_ends_with_the_draw_is_not_skipped"),
    ),
    "51": Trap(
        "prompts in flight lost",
        impossible="a step is saved whole or not at all; its prompts are drawn again; queues: tests/runtime",
    ),
    "53": Trap("bfloat16 swallows small steps", ("test_bfloat16_compute_keeps_float32_masters_that_small_steps_move",)),
    "54": Trap(
        "samples that are copies",
        ("test_a_group_gets_different_noise_and_the_same_again", "test_samples_of_a_prompt_differ_and_repeat"),
    ),
    "55": Trap(
        "a publish overwrites the drafter",
        ("test_policy_and_drafter_have_fingerprints_of_their_own", "test_a_drafter_with_a_map_of_ids_learns_and_keeps_its_map"),
    ),
}


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
