"""Which tests hold each property of the written semantics, section 1, A to D: by its number there."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PADDED, SAMPLES = "unit/lightrft/test_padded.py", "unit/trainer/experience/test_samples.py"
ADVANTAGES, GAE, SURROGATES = (
    f"unit/algorithms/test_{name}.py" for name in ("advantages", "gae", "surrogates")
)
LOSSES, KL, SHAPING, VOTE = ("unit/algorithms/test_losses.py", "unit/algorithms/test_kl.py", "unit/algorithms/test_shaping.py",
                             "unit/rewards/test_vote.py")  # fmt: skip
INVARIANCES, MIX, STEP = (
    "unit/algorithms/test_invariances.py",
    "unit/rewards/test_mix.py",
    "unit/trainer/test_step.py",
)
SAMPLING, FORWARD, CONFIG = (
    "unit/trainer/test_sampling.py",
    "unit/backends/megatron/test_forward.py",
    "unit/config/validation/test_violations.py",
)
ACTOR, LAYOUTS, LOGPROBS = (
    f"distributed/test_{name}.py" for name in ("actor", "invariance", "logprobs")
)
REFUSED = f"{CONFIG}::test_what_cannot_run_is_refused_with_a_reason"

PROPERTIES: dict[int, list[str]] = {
    1: [f"{PADDED}::test_both_layouts_and_rows_lead_back_to_each_other",
        f"{PADDED}::test_prompts_end_and_responses_begin_in_one_column_and_masks_know_a_word_from_padding"],
    2: [f"{ACTOR}::test_packed_log_probs_and_entropy_are_those_of_unpacked_rows_in_transformers",
        f"{SAMPLES}::test_log_probs_stand_at_the_column_before_their_token"],
    3: [f"{FORWARD}::test_every_token_is_taken_once_and_comes_back_to_its_place", f"{ACTOR}::test_no_token_sees_another_row",
        "distributed/test_custom_forward.py::test_logits_come_back_where_the_tokens_were_packed_or_padded"],
    4: [f"{FORWARD}::test_two_processes_share_a_row_in_zig_zag_chunks",
        f"{LAYOUTS}::test_three_updates_are_those_of_one_process_under_every_layout"],
    5: [f"{SAMPLES}::test_siblings_share_a_group_and_truncation_is_kept",
        "unit/rollout/engines/test_engines.py::test_scripted_answers_end_in_the_stop_token_or_at_the_limit"],
    6: [f"{PADDED}::test_prompts_end_and_responses_begin_in_one_column_and_masks_know_a_word_from_padding",
        f"{SAMPLES}::test_rows_hold_prompt_and_response_and_the_mask_covers_the_response_targets"],
    7: [f"{SURROGATES}::test_what_stands_in_padding_changes_neither_loss_nor_gradient",
        f"{SURROGATES}::test_extreme_ratios_have_finite_values_and_gradients",
        f"{LOSSES}::test_a_batch_of_no_rows_and_one_of_empty_answers_have_count_zero_and_the_same_metrics",
        f"{INVARIANCES}::test_a_loss_and_its_gradient_depend_on_nothing_but_the_rows"],
    8: [f"{GAE}::test_a_reward_at_the_end_is_discounted_a_token_however_wide_the_row",
        f"{GAE}::test_equals_the_double_loop_whatever_the_holes", f"{GAE}::test_lambda_of_nought_is_the_error_of_one_step",
        f"{GAE}::test_lambda_of_one_is_what_was_earned_minus_what_was_expected",
        f"{GAE}::test_the_first_advantage_is_the_published_closed_form"],
    9: [f"{GAE}::test_tokens_outside_the_mask_take_no_step_and_are_not_read",
        f"{ADVANTAGES}::test_returns_are_discounted_by_tokens_and_step_over_holes"],
    10: [f"{ADVANTAGES}::test_a_group_that_agrees_teaches_exactly_nothing", f"{ADVANTAGES}::test_a_group_of_one_teaches_nothing",
         f"{ADVANTAGES}::test_without_std_it_is_the_distance_to_the_mean",
         f"{INVARIANCES}::test_an_advantage_depends_on_nothing_but_its_group"],
    11: [f"{ADVANTAGES}::test_leaving_one_out_compares_with_the_mean_of_the_others",
         f"{ADVANTAGES}::test_reinforce_with_a_baseline_is_whitened_over_tokens_not_answers"],
    12: [f"{ADVANTAGES}::test_whitening_is_over_the_tokens_of_the_mask_alone"],
    13: ["unit/algorithms/test_filters.py::test_groups_that_differ_make_up_for_those_that_agree",
         "unit/algorithms/test_filters.py::test_the_cap_and_the_weight_of_agreeing_groups_are_settings"],
    14: [f"{SHAPING}::test_running_moments_are_those_of_everything_seen_so_far",
         f"{SHAPING}::test_the_clip_comes_last_and_everything_is_off_by_itself",
         "unit/monitoring/observers/test_evaluate.py::test_training_is_the_same_with_and_without_evaluation"],
    15: [f"{KL}::test_values_and_gradients_are_those_of_the_formulas",
         f"{KL}::test_k1_and_k3_estimate_the_kl_of_two_distributions", REFUSED],
    16: [f"{ADVANTAGES}::test_an_answers_reward_is_at_its_last_token_once", REFUSED],
    17: [f"{KL}::test_without_a_target_the_weight_stays",
         f"{KL}::test_with_one_it_follows_what_is_seen_by_at_most_a_fifth_of_the_horizon",
         "unit/monitoring/observers/test_checkpointing.py::test_a_resumed_run_equals_one_that_was_never_interrupted"],
    18: [f"{SHAPING}::test_long_answers_pay_from_the_buffer_on_and_never_more_than_the_factor",
         f"{STEP}::test_answers_that_were_cut_off_can_be_left_out_of_the_loss_but_not_of_their_group"],
    19: [f"{SAMPLING}::test_groups_that_agree_are_replaced_until_the_batch_is_full",
         f"{SAMPLING}::test_after_the_last_round_it_goes_on_with_what_there_is",
         f"{SAMPLING}::test_another_part_of_the_reward_can_decide"],
    20: [f"{VOTE}::test_of_equally_many_the_first_to_appear_wins", f"{VOTE}::test_who_says_nothing_does_not_vote",
         f"{VOTE}::test_answers_that_say_the_same_are_counted_as_one",
         f"{STEP}::test_of_each_prompts_answers_the_first_are_trained_from_and_all_are_there_to_be_compared"],
    21: [f"{MIX}::test_every_kind_has_its_own_parts_and_weights_and_the_order_stays",
         f"{MIX}::test_a_kind_that_the_recipe_does_not_hold_is_found_before_training_and_refused_while_scoring",
         f"{MIX}::test_the_format_rule_must_match_the_whole_response"],
    22: [f"{SURROGATES}::test_just_beyond_the_clip_nothing_is_trained_and_clip_higher_moves_the_upper_edge_alone",
         f"{SURROGATES}::test_a_dual_clip_bounds_the_loss_of_bad_answers_alone", REFUSED],
    23: [f"{SURROGATES}::test_value_and_gradient_are_the_formulas", f"{LAYOUTS}::test_every_case_of_the_table",
         f"{LAYOUTS}::test_in_one_process_the_micro_batch_size_and_the_order_of_rows_do_not_matter"],
    24: [f"{SURROGATES}::test_just_beyond_the_clip_nothing_is_trained_and_clip_higher_moves_the_upper_edge_alone",
         f"{SURROGATES}::test_the_drift_of_cpgd_is_never_negative_and_pulls_back",
         f"{SURROGATES}::test_before_anything_has_changed_all_of_them_have_the_same_gradient"],
    25: [f"{SURROGATES}::test_a_sequence_ratio_is_normalised_by_length_and_clips_all_tokens_together"],
    26: [f"{LOGPROBS}::test_values_and_gradients_equal_dense_autograd",
         f"{LOGPROBS}::test_log_prob_alone_and_entropy_alone_have_gradients"],
    27: [f"{SURROGATES}::test_tokens_of_high_entropy_are_kept_at_least_one_an_answer_never_padding", REFUSED],
    28: ["unit/algorithms/test_values.py::test_value_and_gradient_are_those_of_a_double_loop",
         "unit/algorithms/test_values.py::test_a_value_that_moved_too_far_towards_its_return_is_not_pulled_further"],
    29: [f"{SURROGATES}::test_importance_weights_are_bounded_and_carry_no_gradient",
         f"{SURROGATES}::test_with_a_cap_of_one_no_importance_weight_is_above_one",
         "distributed/test_vllm.py::test_vllm_agrees_with_the_trainer_and_with_transformers"],
    30: [f"{ACTOR}::test_packed_log_probs_and_entropy_are_those_of_unpacked_rows_in_transformers",
         "distributed/test_custom_forward.py::test_log_probs_without_logits_take_a_temperature_a_row"],
    31: ["unit/runtime/device/test_average.py::test_the_average_is_its_closed_form_in_float32",
         "distributed/test_ptx.py::test_updates_equal_a_plain_loop_in_one_process_and_in_four",
         "unit/backends/runner/test_auxiliary.py::test_value_and_gradient_are_the_sum_of_two_means_however_they_are_split",
         "e2e/test_loop.py::test_the_first_steps_agree_between_layouts",
         f"{STEP}::test_a_frozen_policy_stays_while_the_critic_learns"],
    32: ["unit/model_providers/test_balancing.py::test_experts_are_not_balanced_by_another_loss"],
}  # fmt: skip


@pytest.mark.parametrize("number", range(1, 33))
def test_every_property_is_held_by_tests_that_there_are(number: int) -> None:
    assert PROPERTIES[number]
    for named in PROPERTIES[number]:
        file, name = named.split("::")
        tree = ast.parse((TESTS / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, named
