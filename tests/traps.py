"""What people trip over when they train language models with RL: each known fault of the learner's side is a test, or cannot be written.

Two kinds of entries: `tests` names the tests that would fail if the fault were made; `impossible` says why it cannot be. The ids are those of
our list of public faults (letters for the general ones, numbers for off-policy and asynchronous learning). The latter name tests of
every mode they can occur in: `lagged`, `overlap` and `in_flight` beside the synchronous loop.
"""

import dataclasses


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
        (
            "test_lagged_versions_are_as_predicted",
            "test_overlapped_modes_stay_within_the_limit",
            "test_age_at_the_limit_is_kept_and_one_more_is_not",
            "test_minibatches_and_passes_count_as_one_version",
        ),
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
        (
            "test_stored_log_probs_decide_the_ratio",
            "test_stale_data_with_recomputed_log_probs_need_a_weight",
            "test_ratios_are_one_for_fresh_data_and_not_for_stale_data",
            "test_stale_data_need_a_correction_or_leave",
        ),
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
    "39": Trap(
        "adapters never delivered",
        (
            "test_adapters_change_nothing_at_first_and_are_all_that_is_trained",
            "test_what_is_served_in_the_end_are_the_learners_weights",
        ),
    ),
    "41": Trap(
        "first rollouts with old weights",
        (
            "test_sync_is_never_stale_and_agrees_with_itself",
            "test_lagged_versions_are_as_predicted",
            "test_pinned_overlap_is_lagged_bit_for_bit",
            "test_overlapped_modes_stay_within_the_limit",
            "test_limit_zero_equals_sync_and_mixes_nothing",
        ),
    ),
    "42": Trap(
        "caches of old weights",
        (
            "test_new_weights_leave_nothing_behind",
            "test_a_recomputed_cache_gives_the_new_versions_own_tokens",
            "test_a_kept_cache_says_so_in_versions_and_draws_what_it_says",
        ),
    ),
    "43": Trap(
        "live references",
        (
            "test_snapshot_survives_donation_of_the_learners_buffers",
            "test_snapshot_for_another_device_lives_there_in_the_engines_layout_and_survives",
        ),
    ),
    "45": Trap(
        "long answers thrown away",
        (
            "test_long_responses_are_learnt_from_as_often_as_they_are_made",
            "test_overlapped_modes_stay_within_the_limit",  # every prompt, visit and sample, in the order of submission
        ),
    ),
    "46": Trap(
        "staleness limit off by one",
        (
            "test_age_at_the_limit_is_kept_and_one_more_is_not",
            "test_chance_never_breaks_the_bound_and_loses_nothing",
            "test_limit_zero_equals_sync_and_mixes_nothing",
            "test_a_lower_limit_on_resume_begins_over_age_groups_again",
            "test_tokens_of_an_illegal_age_end_the_run_before_anything_is_learnt",
        ),
    ),
    "47": Trap(
        "a worker's error never arrives",
        (
            "test_the_scorers_own_exception_ends_the_batch",
            "test_a_worker_that_dies_ends_the_batch_by_default",
            "test_the_first_error_reaches_who_waits_within_two_seconds",
            "test_the_first_error_ends_the_run_and_the_run_goes_on_after",
            "test_a_reward_worker_that_dies_ends_the_run_with_its_exit_code",
        ),
    ),
    # There is no event loop to block; a thread that gives no sign of life is what is left of it.
    "49": Trap(
        "a blocked event loop",
        ("test_silence_is_an_error_and_a_long_wait_is_none", "test_a_generator_that_hangs_is_noticed"),
    ),
    "50": Trap(
        "data order after a resume",
        (
            "test_going_on_from_a_saved_state_is_the_unbroken_run",
            "test_an_epoch_that_ends_with_the_draw_is_not_skipped",
            "test_lagged_stopped_and_resumed_equals_unbroken",
            "test_a_lagged_run_killed_anywhere_ends_in_the_same_bits",
        ),
    ),
    "51": Trap(
        "prompts in flight lost",
        (
            "test_lagged_stopped_and_resumed_equals_unbroken",
            "test_overlapped_stopped_and_resumed_learns_from_every_prompt_once",
            "test_overlapped_runs_killed_and_terminated_learn_from_every_prompt_once",
            "test_the_first_error_ends_the_run_and_the_run_goes_on_after",
            "test_rollouts_through_a_checkpoint",
        ),
    ),
    "53": Trap("bfloat16 swallows small steps", ("test_bfloat16_compute_keeps_float32_masters_that_small_steps_move",)),
    "54": Trap(
        "samples that are copies",
        ("test_a_group_gets_different_noise_and_the_same_again", "test_samples_of_a_prompt_differ_and_repeat"),
    ),
    "55": Trap(
        "a publish overwrites the drafter",
        (
            "test_new_drafter_weights_alone_change_no_version_and_no_token",
            "test_policy_and_drafter_have_fingerprints_of_their_own",
            "test_a_drafter_with_a_map_of_ids_learns_and_keeps_its_map",
        ),
    ),
}
