"""Table of the documented API of LightRFT and RLinf, with the object here that corresponds to each
name. `page` renders it for docs/; tests/unit/website/test_reference_api.py checks it.

Rows A and B: LightRFT's `strategy_base` and overview. C: `PPOTrainerVL`. D: `experience_maker`. E:
RLinf's actor interface.
"""

from typing import Literal, NamedTuple

Status = Literal["implemented", "equivalent", "rejected"]

BASE = "rftmega.lightrft.strategy.StrategyBase"
BY_MEGATRON = "rftmega.lightrft.megatron_strategy.LightRFTStrategy"
TRAINER = "rftmega.lightrft.ppo_trainer_vl.PPOTrainerVL"
PADDED = "rftmega.lightrft.padded_experience"
MAKER = "rftmega.lightrft.naive_experience_maker.NaiveExperienceMaker"
MEGATRON = "rftmega.rlinf.megatron"
FSDP = "rftmega.rlinf.fsdp"

IN_BASE = "tests/unit/lightrft/test_base.py::test_"
IN_STRATEGY = "tests/distributed/test_strategy.py::test_"
IN_TRAINER = "tests/unit/lightrft/test_actor_vl.py::test_"
IN_PADDED = "tests/unit/lightrft/test_padded.py::test_"
IN_MAKER = "tests/unit/lightrft/test_naive.py::test_"
LOOP = "tests/distributed/test_lightrft_loop.py::test_backward_and_optimizer_step_take_the_trainers_own_steps"
LOOP_WITH_IMAGES = "tests/distributed/test_lightrft_loop.py::test_so_they_do_with_images"
WITH_CRITIC = (
    "tests/distributed/test_lightrft_loop.py::test_a_critic_learns_by_its_own_steps_and_by_backward"
)
WITH_MEGATRON = f"{IN_STRATEGY}the_strategy_of_megatron_generates_saves_and_loads_under_the_names_that_users_know"
WITH_IMAGES = (
    "tests/distributed/test_lightrft_vision.py::"
    "test_answers_log_probs_and_experience_are_those_of_transformers"
)
REFUSED = f"{IN_TRAINER}an_argument_that_something_else_decides_is_refused"
ACTOR_STEPS = (
    "tests/distributed/test_rlinf.py::"
    "test_an_actor_driven_by_its_calls_alone_takes_the_steps_of_a_run"
)
MANAGER_STEPS = (
    "tests/distributed/test_rlinf.py::"
    "test_a_loop_with_the_managers_calls_learns_as_plain_torch_from_the_mean_over_processes"
)
SCHEDULE = (
    "tests/distributed/test_rlinf.py::"
    "test_megatrons_schedule_runs_the_actors_closure_and_a_reference_only_scores"
)


class Row(NamedTuple):
    """Row is one documented name and its counterpart here."""

    id: str  # as in the specification, with a letter where a row of it is split
    name: str
    status: Status
    where: str  # import path of the object here; "" only if rejected
    signature: str = ""  # documented parameters, as they are accepted here; "" if not callable
    returns: str = ""
    note: str = ""
    test: str = ""  # node id of a test that calls it; "" if there is none


STRATEGY = (
    Row(
        "A01", "EngineStatus", "implemented", "rftmega.lightrft.strategy.EngineStatus",
        note="`SLEEPED` is 0 and `WAKEUP` is 1.",
        test=f"{IN_BASE}there_is_one_engine_status_with_the_numbers_that_users_know",
    ),
    Row(
        "A02", "StrategyBase", "implemented", BASE,
        "seed, max_norm, micro_train_batch_size, train_batch_size, args=None",
        note="`LightRFTStrategy(strategy)` is the subclass that trains. It wraps a `ReinforcementStrategy`, for "
        "`backend: megatron` "
        "or `fsdp`.",
        test=f"{IN_BASE}prepared_models_keep_their_structure",
    ),
    Row(
        "A03", "StrategyBase._build_multimodal_inputs", "implemented", f"{BASE}._build_multimodal_inputs",
        "all_prompts, all_images, images_num, all_videos, videos_num",
        "a list of dicts with `prompt` and, if there are any, `multi_modal_data`",
        "Both layouts are accepted, nested and flat. Numbers that don't match raise a `ValueError`.",
        "tests/unit/lightrft/test_multimodal.py::test_both_layouts_say_the_same",
    ),
    Row(
        "A04", "StrategyBase.all_gather", "implemented", f"{BASE}.all_gather", "data",
        "concatenated tensor, or a dict of them",
        "The first dimension may differ between processes, and may be 0.",
        f"{IN_STRATEGY}collectives_take_what_each_process_holds_and_keep_its_form",
    ),
    Row(
        "A05", "StrategyBase.all_reduce", "implemented", f"{BASE}.all_reduce", "data, op='mean'",
        "same format as the input",
        "It does not change its input, and works on any device. Integers stay exact, and their mean is a fraction. "
        "Half-precision "
        "tensors are summed in float32.",
        f"{IN_STRATEGY}collectives_take_what_each_process_holds_and_keep_its_form",
    ),
    Row(
        "A06", "StrategyBase.backward", "implemented", f"{BY_MEGATRON}.backward",
        "loss, model, optimizer, **kwargs", "None",
        "`model` is the policy or the critic. With `parallel.pipeline` above 1 it raises `NotImplementedError`: call "
        "`policy.step(experience, loss_fn)` instead. `optimizer` is ignored.",
        LOOP,
    ),
    Row(
        "A07", "StrategyBase.create_optimizer", "implemented", f"{BY_MEGATRON}.create_optimizer",
        "model, **kwargs", "the optimizer",
        "It returns the optimizer that the model was built with. Keyword arguments raise a `ValueError`: set "
        "`optimizer.*` in the "
        "config.",
        WITH_MEGATRON,
    ),
    Row(
        "A08", "StrategyBase.optimizer_step", "implemented", f"{BY_MEGATRON}.optimizer_step",
        "optimizer, model, scheduler, name='model', **kwargs", "None",
        "It averages the gradients of all `backward` calls since the last step over the processes. `name` is printed "
        "if a step is "
        "skipped because its gradients are not finite.",
        LOOP,
    ),
    Row(
        "A09", "StrategyBase.save_ckpt", "implemented", f"{BY_MEGATRON}.save_ckpt",
        "model, save_dir, tag=None, max_num=3, max_mem=1000, client_state=None, save_latest=True", "None",
        "`max_mem` limits all checkpoints of the folder together, in MB (10^6 bytes). `client_state` must be "
        "JSON-serialisable. Old "
        "checkpoints are deleted after the new one is written.",
        WITH_MEGATRON,
    ),
    Row(
        "A10", "StrategyBase.load_ckpt", "implemented", f"{BY_MEGATRON}.load_ckpt",
        "model, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True, "
        "load_module_only=False",
        "(folder of the checkpoint, `client_state`)",
        "All flags have an effect, and any parallel layout may load the checkpoint. Call `update_engine_weights` afterwards.",
        WITH_MEGATRON,
    ),
    Row(
        "A11", "StrategyBase.engine_generate_local", "implemented", f"{BASE}.engine_generate_local",
        "sampling_params, prompt_token_ids=None, multi_modal_inputs=None",
        "a list of dicts whose keys are also attributes",
        "You may set `temperature` and `seed`. Other sampling options are refused at values that have an effect.",
        f"{IN_BASE}one_prompt_or_several_are_answered_with_ids_under_both_kinds_of_access",
    ),
    Row(
        "A12", "StrategyBase.gather_and_generate", "implemented", f"{BASE}.gather_and_generate",
        "sampling_params, all_prompt_token_ids=None, all_prompts=None, all_images=None, sleep_engine=True, images_num=None, "
        "all_videos=None, videos_num=None",
        "completions of this process's prompts",
        "Every process must call it; it may have no prompts. Without an engine it raises `NotImplementedError`.",
        f"{IN_STRATEGY}every_process_gets_the_answers_to_its_own_prompts_whoever_shares_an_engine",
    ),
    Row(
        "A13a", "StrategyBase.get_rank", "implemented", f"{BASE}.get_rank",
        returns="int", note="It is 0 without a process group.",
        test=f"{IN_BASE}a_launched_process_joins_once_and_is_seeded",
    ),
    Row(
        "A13b", "StrategyBase.is_rank_0", "implemented", f"{BASE}.is_rank_0",
        returns="bool", note="It is true without a process group.",
        test=f"{IN_BASE}without_a_launcher_nothing_is_joined",
    ),
    Row(
        "A14", "StrategyBase.init_model_context", "implemented", f"{BASE}.init_model_context",
        returns="a context manager", note="It prints memory statistics when its block ends.",
        test=f"{IN_BASE}lines_have_a_time_and_memory_is_told_in_mib",
    ),
    Row(
        "A15a", "StrategyBase.maybe_load_optimizer", "implemented", f"{BY_MEGATRON}.maybe_load_optimizer",
        "optimizer, device=None", "the optimizer",
        "`device=None` means this process's device. `LightRFTStrategy` ignores another one.",
        WITH_MEGATRON,
    ),
    Row(
        "A15b", "StrategyBase.maybe_offload_optimizer", "implemented",
        f"{BY_MEGATRON}.maybe_offload_optimizer", "optimizer", "the optimizer",
        "It moves the state to the host if `trainer.offload` is set.",
        WITH_MEGATRON,
    ),
    Row(
        "A16", "StrategyBase.maybe_sleep_inference_engine", "implemented",
        f"{BASE}.maybe_sleep_inference_engine", returns="None",
        note="A sleeping engine drops its weights: call `update_engine_weights` before the next generation. Set "
        "`args.enable_engine_sleep=False` to keep the engine awake.",
        test=f"{IN_BASE}memory_is_cleared_after_a_sleep_and_before_a_waking",
    ),
    Row(
        "A17", "StrategyBase.wakeup_inference_engine", "implemented",
        f"{BASE}.wakeup_inference_engine", returns="None",
        note="It releases unused cached memory first. An unknown engine type raises a `ValueError`.",
        test=f"{IN_BASE}memory_is_cleared_after_a_sleep_and_before_a_waking",
    ),
    Row(
        "A18", "StrategyBase.prepare", "implemented", f"{BASE}.prepare",
        "*models_or_pairs, is_rlhf=False", "same structure; one item is not in a list",
        "Models of `LightRFTStrategy` are already prepared, so it returns them unchanged. `is_rlhf` is only stored.",
        f"{IN_BASE}prepared_models_keep_their_structure",
    ),
    Row(
        "A19", "StrategyBase.prepare_models_and_optimizers", "implemented",
        f"{BASE}.prepare_models_and_optimizers",
        "actor, critic, reward_models, initial_model, args, max_steps",
        "((actor, optimizer, scheduler), (critic, optimizer, scheduler), reward models, initial model)",
        "A missing critic is (None, None, None). `max_steps` must be the number of steps that the config plans.",
        f"{IN_BASE}models_come_back_with_their_optimizers_and_a_missing_critic_with_none",
    ),
    Row(
        "A20", "StrategyBase.print", "implemented", f"{BASE}.print", "*msg", "None",
        test=f"{IN_BASE}lines_have_a_time_and_memory_is_told_in_mib",
    ),
    Row(
        "A21", "StrategyBase.report_memory", "implemented", f"{BASE}.report_memory", "prefix=''",
        "None", "It prints the statistics of rank 0's device in MiB.",
        f"{IN_BASE}memory_is_reported_with_a_prefix",
    ),
    Row(
        "A22", "StrategyBase.sync_and_clear_cache", "implemented", f"{BASE}.sync_and_clear_cache",
        returns="None",
        note="It waits for the device, then for all processes, and then releases unused cached memory.",
        test=f"{IN_BASE}the_device_is_waited_for_then_the_processes_then_memory_is_given_back",
    ),
    Row(
        "A23", "StrategyBase.set_seed", "implemented", f"{BASE}.set_seed", "seed", "None",
        "It seeds Python, NumPy and torch, on the host and on every device.",
        f"{IN_BASE}a_seed_covers_python_numpy_and_torch",
    ),
    Row(
        "A24", "StrategyBase.setup_dataloader", "implemented", f"{BASE}.setup_dataloader",
        "replay_buffer, batch_size, pin_memory=False, shuffle=True, collate_fn=None, drop_last=True, sampler=None, "
        "consumed_samples=0",
        "a torch `DataLoader`",
        "Every process gets the same batches. `consumed_samples` together with a `sampler` raises a `ValueError`.",
        f"{IN_BASE}a_loader_goes_on_where_another_stopped_whichever_epoch_that_was",
    ),
    Row(
        "A25", "StrategyBase.setup_distributed", "implemented", f"{BASE}.setup_distributed",
        "timeout=None, num_gpu_per_node=8", "None",
        "It also seeds the process. `num_gpu_per_node` is used if the launcher does not set LOCAL_WORLD_SIZE.",
        f"{IN_BASE}without_a_launcher_nothing_is_joined",
    ),
    Row(
        "A26", "StrategyBase.setup_inference_engine", "implemented", f"{BASE}.setup_inference_engine",
        "args, engine_type='vllm', actor=None", "the engine",
        "Engine types are vllm, transformers and scripted. `sglang` raises a `ValueError`: SGLang servers are for "
        "`rftmega train`. "
        "`LightRFTStrategy` accepts only the type in `rollout.engine`.",
        f"{IN_BASE}an_engine_is_built_pushed_to_put_to_sleep_and_woken",
    ),
    Row(
        "A27", "StrategyBase.unwrap_model", "implemented", f"{BASE}.unwrap_model", "model",
        "the model without wrappers",
        test=f"{IN_BASE}wrappers_come_off_and_only_policies_are_actors",
    ),
    Row(
        "A28", "StrategyBase.update_engine_weights", "implemented",
        f"{BY_MEGATRON}.update_engine_weights", "actor", "None",
        "`actor` must be the policy of the strategy.", WITH_MEGATRON,
    ),
    Row(
        "A29", "is_actor", "implemented", "rftmega.lightrft.strategy.is_actor", "model", "bool",
        "A model is an actor if it has a method `log_probs`.",
        f"{IN_BASE}wrappers_come_off_and_only_policies_are_actors",
    ),
)  # fmt: skip

OVERVIEW = (
    Row(
        "B01a", "hardware: NVIDIA", "equivalent", "rftmega.runtime.device.current",
        note="The device is found at the start. Without a GPU, everything runs on the CPU.",
        test="tests/unit/lightrft/test_base.py::"
        "test_the_device_is_waited_for_then_the_processes_then_memory_is_given_back",
    ),
    Row(
        "B01b", "hardware: Huawei", "rejected", "",
        note="There is no back-end for Ascend devices. Use NVIDIA GPUs, or a CPU for tests.",
    ),
    Row(
        "B01c", "distributed execution: DeepSpeed ZeRO", "equivalent",
        "rftmega.lightrft.sharding_options.sharding_overrides", "args",
        "overrides for `rftmega.config.load`",
        "ZeRO 1 is `backend: megatron` with `optimizer.distributed`. ZeRO 2 and 3 are `backend: fsdp`, without and with "
        "`parallel.reshard_after_forward`.",
        "tests/unit/lightrft/test_sharding_options.py::"
        "test_each_option_becomes_one_that_a_run_can_have",
    ),
    Row(
        "B01d", "distributed execution: FSDP", "equivalent",
        "rftmega.backends.fsdp.manager.FSDPModelManager",
        note="Set `backend: fsdp`, which uses torch's FSDP2.", test=MANAGER_STEPS,
    ),
    Row(
        "B01e", "engines: vLLM, SGLang", "equivalent", "rftmega.config.RolloutConfig.engine",
        note="`rollout.engine: vllm` is the default. SGLang is used through remote servers only.",
        test="tests/distributed/test_engine_faults.py::"
        "test_an_engine_in_the_trainers_process_gets_its_weights_again_and_answers_what_is_left",
    ),
    Row(
        "B01f", "tasks: mathematics (AIME, GSM8K)", "equivalent", "rftmega.rewards.math.MathPart",
        note="Set the weight `reward.math`. `examples/gsm8k` and `examples/dapo_math` are complete.",
        test="tests/unit/rewards/test_math.py::"
        "test_equal_expressions_score_however_they_are_written_and_nothing_raises",
    ),
    Row(
        "B01g", "tasks: code (LiveCodeBench, SWE)", "equivalent", "rftmega.rewards.code.CodePart",
        note="Set the weight `reward.code`. The tests of a label run in a sandbox. For repositories (SWE), write an "
        "environment of your own.",
        test="tests/unit/rewards/test_code.py::"
        "test_code_that_passes_all_tests_scores_and_other_code_does_not",
    ),
    Row(
        "B01h", "tasks: search", "equivalent", "rftmega.environments.tool_environment.ToolsEnvironment",
        note="Write the search as a Python function, and set `environment: {type: tools, tools: [my_tools.py:search]}`.",
        test="tests/unit/environments/test_tools_environment.py::"
        "test_answers_are_trained_from_and_replies_are_not",
    ),
    Row(
        "B02a", "GRPO", "equivalent", "rftmega.algorithms.advantages.group_normalised",
        note="Set `algorithm.recipe: grpo`.",
        test="tests/unit/algorithms/test_advantages.py::"
        "test_it_equals_the_formula_on_ragged_interleaved_groups",
    ),
    Row(
        "B02b", "DAPO", "equivalent", "rftmega.trainer.dynamic_sampler.DynamicSampler",
        note="Set `algorithm.recipe: dapo`: clip higher, dynamic sampling, token mean and overlong penalty.",
        test="tests/unit/trainer/test_sampling.py::"
        "test_groups_that_agree_are_replaced_until_the_batch_is_full",
    ),
    Row(
        "B02c", "TTRL", "equivalent", "rftmega.rewards.majority.MajorityReward",
        note="Set `algorithm.recipe: ttrl`. It needs no labels.",
        test="tests/unit/rewards/test_majority.py::"
        "test_answers_are_scored_by_what_most_answers_to_the_same_prompt_say",
    ),
    Row(
        "B02d", "CPGD", "equivalent", "rftmega.config.options.algorithms.CPGD",
        note="Set `algorithm.recipe: cpgd`.",
        test="tests/unit/algorithms/test_surrogates.py::"
        "test_the_drift_of_cpgd_is_never_negative_and_pulls_back",
    ),
    Row(
        "B03a", "actor and reference, colocated", "equivalent",
        "rftmega.run.placement.colocated.ColocatedPolicy",
        note="`strategy: colocated` is the default. The policy computes the reference's log-probs as well.",
        test="tests/distributed/test_shared_base.py::"
        "test_a_critic_on_the_policys_weights_has_the_numbers_of_one_with_its_own_and_no_second_copy",
    ),
    Row(
        "B03b", "verifiable rules", "equivalent", "rftmega.rewards.mix.MixedReward",
        note="Set the weights of rules, such as `reward.math`, or name a Python function in `reward.functions`.",
        test="tests/unit/rewards/test_mix.py::"
        "test_an_exact_match_ignores_white_space_around_only",
    ),
    Row(
        "B03c", "reward models", "equivalent", "rftmega.trainer.experience.model_reward.ModelReward",
        note="Set `reward.model` and `reward.model_path`.",
        test="tests/unit/trainer/experience/test_model_reward.py::"
        "test_a_score_is_weighed_and_kept_as_a_part",
    ),
    Row(
        "B03d", "critic", "equivalent", "rftmega.run.placement.colocated.ColocatedValues",
        note="`algorithm.advantage: gae` adds a critic with the options `critic.*`.",
        test="tests/distributed/test_shared_base.py::"
        "test_a_critic_on_the_policys_weights_has_the_numbers_of_one_with_its_own_and_no_second_copy",
    ),
    Row(
        "B04", "Universal Colocate", "equivalent", "rftmega.run.placement.phases.DevicePhases",
        note="Models and engine share each device. Set `trainer.offload` to move the models to the host while the "
        "engine generates.",
        test="tests/distributed/test_early_stop.py::"
        "test_engines_stop_after_the_same_step_with_the_same_answers_whatever_the_timing",
    ),
    Row(
        "B05a", "datasets: text prompts", "equivalent", "rftmega.data.prompts.load_prompts",
        note="Set `data.train`.", test="tests/unit/data/test_prompts.py::"
        "test_prompts_keep_their_label_and_place",
    ),
    Row(
        "B05b", "datasets: vision-language prompts", "equivalent", "rftmega.data.prompts.load_prompts",
        note="Records with images or videos are read if the model has a vision encoder.",
        test="tests/unit/data/test_prompt_images.py::"
        "test_placeholders_are_expanded_where_the_images_are",
    ),
    Row(
        "B05c", "datasets: SFT", "equivalent", "rftmega.data.supervised.load_supervised",
        note="Set `algorithm.task: sft`.",
        test="tests/unit/data/test_supervised.py::test_the_last_answer_is_trained_with_its_end",
    ),
    Row(
        "B05h", "datasets: SFT, vision-language and audio-language", "equivalent",
        "rftmega.data.supervised.load_supervised",
        note="Set `algorithm.task: sft`. Prompts may have images, videos or waveforms.",
        test="tests/unit/data/test_prompt_images.py::"
        "test_an_answer_about_images_is_trained_behind_their_features",
    ),
    Row(
        "B05d", "datasets: reward model, general", "equivalent",
        "rftmega.data.preference.load_preferences",
        note="Set `algorithm.task: reward_model`. A record has a chosen and a rejected response, in the formats of "
        "UltraFeedback, "
        "HH-RLHF or ShareGPT.",
        test="tests/unit/data/test_supervised.py::"
        "test_pairs_are_side_by_side_with_a_place_for_the_score_behind_each",
    ),
    Row(
        "B05e", "datasets: reward model, safe", "equivalent",
        "rftmega.data.preference.load_preferences",
        note="Set `data.chosen_key: safer_response_id` and `algorithm.reward_model_loss: cost` to train a cost model, and "
        "use it as `reward.cost_path`, beside a reward model of helpfulness.",
        test="tests/unit/data/test_published_records.py::"
        "test_the_number_of_the_better_or_of_the_safer_response_chooses_it",
    ),
    Row(
        "B05f", "datasets: audio-language", "equivalent",
        "rftmega.data.media.audio_processor.AudioProcessor",
        note="Records with waveforms are read if the model has an audio encoder.",
        test="tests/unit/data/media/test_audio_processor.py::"
        "test_tokens_and_frames_are_those_of_transformers",
    ),
    Row(
        "B05g", "datasets: tokenisation", "equivalent", "rftmega.data.tokenizer.Tokenizer",
        note="Prompts go through the chat template of the model's folder, or of `data.chat_template_file`, if "
        "`data.chat_template` is set.",
        test="tests/unit/data/test_tokenizer.py::"
        "test_an_answer_to_plain_text_is_its_tokens_and_the_end",
    ),
    Row(
        "B06a", "models: ActorVL", "implemented", "rftmega.lightrft.actor_vl.ActorVL",
        note="It takes the policy that a strategy has built, not a path. Settings such as `lora_rank` raise a "
        "`ValueError` that names "
        "the config option.",
        test=f"{IN_TRAINER}an_actor_is_a_policy_and_gives_the_log_probs_of_responses",
    ),
    Row(
        "B06b", "models: ActorAL", "implemented", "rftmega.lightrft.actor_al.ActorAL",
        note="It is like `ActorVL`, for audio-language models.",
        test="tests/distributed/test_audio.py::"
        "test_lightrft_s_actor_gives_the_log_probs_of_transformers",
    ),
    Row(
        "B06c", "models: ActorLanguage", "equivalent", "rftmega.lightrft.actor_vl.ActorVL",
        note="`ActorVL` takes a policy without a vision encoder as well.", test=LOOP,
    ),
    Row(
        "B06d", "models: reward models", "equivalent",
        "rftmega.trainer.experience.model_reward.ModelReward",
        note="Set `reward.model_path` to a model with one output. Train one with `algorithm.task: reward_model`.",
        test="tests/unit/trainer/experience/test_model_reward.py::"
        "test_a_score_is_weighed_and_kept_as_a_part",
    ),
    Row(
        "B06e", "models: policy losses", "equivalent", "rftmega.algorithms.losses.policy_loss",
        note="Set `algorithm.policy_loss`: clip, gspo, cispo, cpgd, reinforce or your own.",
        test="tests/unit/algorithms/test_losses.py::test_it_equals_the_formula",
    ),
    Row(
        "B06f", "models: monkey patching", "equivalent",
        "rftmega.backends.fsdp.manager.FSDPModelManager.model_provider_func",
        note="Models are built from their config, and transformers is not patched. To change a model's modules, override "
        "`model_provider_func`.",
        test=MANAGER_STEPS,
    ),
    Row(
        "B06g", "models: LLaMA, Qwen", "equivalent", "rftmega.model_providers.description.describe",
        note="See the list of supported architectures.",
        test="tests/unit/model_providers/test_description.py::"
        "test_the_number_of_parameters_is_transformers",
    ),
    Row(
        "B06h", "models: custom generation", "equivalent", "rftmega.config.RunConfig.environment",
        note="Write an environment that asks the engine for several turns.",
        test="tests/unit/environments/test_tools_environment.py::"
        "test_answers_are_trained_from_and_replies_are_not",
    ),
    Row(
        "B07a", "strategy: selection from the config", "equivalent", "rftmega.config.RunConfig.backend",
        note="Set `backend` and `strategy`.",
        test="tests/e2e/test_backends.py::"
        "test_another_backend_trains_pushes_saves_and_resumes_as_megatron_does",
    ),
    Row(
        "B07b", "strategy: checkpoints", "equivalent",
        "rftmega.checkpoints.run_checkpoints.TrainingCheckpoints",
        note="Set `checkpoint.*`. Every layout reads the checkpoints of every other.",
        test="tests/distributed/test_checkpoints.py::"
        "test_a_run_goes_on_bit_for_bit_and_its_snapshot_is_a_copy",
    ),
    Row(
        "B07c", "strategy: broadcast of weights", "equivalent", "rftmega.weights.push.EngineWeights",
        note="Each engine process gets only the slices that it needs.",
        test="tests/distributed/test_push.py::"
        "test_engines_get_what_they_read_and_no_byte_more_is_moved",
    ),
    Row(
        "B07d", "strategy: tensor operations", "equivalent",
        "rftmega.runtime.parallel.collectives.all_gather",
        note="`StrategyBase.all_gather` and `all_reduce` call these.",
        test=f"{IN_STRATEGY}collectives_take_what_each_process_holds_and_keep_its_form",
    ),
    Row(
        "B08a", "trainer: PPO", "equivalent", "rftmega.trainer.ppo.PPOTrainer",
        note="Set `algorithm.recipe: ppo`. `PPOTrainerVL` has LightRFT's interface.",
        test="tests/unit/trainer/test_step.py::test_every_recipe_learns",
    ),
    Row(
        "B08b", "trainer: replay buffer", "equivalent", "rftmega.trainer.experience.replay.ReplayBuffer",
        note="One buffer holds text and images. Set `algorithm.replay.*`.",
        test="tests/unit/trainer/experience/test_replay.py::"
        "test_without_a_limit_everything_stays_and_with_one_the_oldest_groups_go_whole",
    ),
    Row(
        "B08c", "trainer: KL control", "equivalent", "rftmega.algorithms.kl.KLController",
        note="Set `algorithm.kl.coef`, `target` and `horizon`.",
        test="tests/unit/algorithms/test_kl.py::"
        "test_with_one_it_follows_what_is_seen_by_at_most_a_fifth_of_the_horizon",
    ),
    Row(
        "B08d", "trainer: value updates", "equivalent", "rftmega.algorithms.values.value_loss",
        note="Set `critic.*`.",
        test="tests/unit/algorithms/test_values.py::"
        "test_value_and_gradient_are_those_of_a_double_loop",
    ),
    Row(
        "B08e", "trainer: advantages and returns", "equivalent", "rftmega.algorithms.gae.gae",
        note="Set `algorithm.advantage`.",
        test="tests/unit/algorithms/test_gae.py::"
        "test_the_first_advantage_is_the_published_closed_form",
    ),
    Row(
        "B08f", "trainer: SPMD", "equivalent", TRAINER,
        note="Every process calls the same methods with the whole batch, so there is no separate SPMD trainer.",
        test=LOOP,
    ),
    Row(
        "B09a", "command line", "equivalent", "rftmega.run.command_line.run",
        note="`rftmega train my.yaml`. Overrides have the form `rollout.temperature=0.8`.",
        test="tests/e2e/test_loop.py::"
        "test_dry_run_prints_layout_batch_and_parameters_and_starts_nothing",
    ),
    Row(
        "B09b", "distributed sampler", "equivalent", "rftmega.data.sampler.PromptOrder",
        note="Every process has the same order, which is seeded and can be resumed.",
        test="tests/unit/data/test_prompts.py::test_a_resumed_order_goes_on_where_it_was",
    ),
    Row(
        "B09c", "logging", "equivalent", "rftmega.monitoring.observers.metric_writers.TensorBoard",
        note="`metrics.jsonl` and TensorBoard's files are written to the run's folder. Set `logging.wandb` for Weights & Biases.",
        test="tests/unit/monitoring/observers/test_checkpointing.py::"
        "test_a_resumed_run_equals_one_that_was_never_interrupted",
    ),
    Row(
        "B09d", "multimodal processors", "equivalent",
        "rftmega.data.media.image_processor.ImageProcessor",
        note="It computes the same patches as the processor of transformers. `AudioProcessor` is for waveforms.",
        test="tests/unit/data/media/test_image_processor.py::"
        "test_grid_tokens_and_patches_are_those_of_transformers",
    ),
    Row(
        "B09e", "remote reward models", "equivalent", "rftmega.rewards.remote.RemotePart",
        note="Set `reward.remote` (its weight) and `reward.remote_url`.",
        test="tests/unit/rewards/test_remote.py::"
        "test_answers_travel_in_batches_and_rewards_come_back_in_order",
    ),
    Row(
        "B09f", "timers and profiling", "equivalent", "rftmega.runtime.device.spans.SpanRecorder",
        note="The seconds of each phase are in the metrics. `logging.timeline` writes a timeline.",
        test="tests/unit/runtime/device/test_spans.py::"
        "test_seconds_and_counts_add_up_until_they_are_taken",
    ),
    Row(
        "B09g", "trajectory saver", "equivalent", "rftmega.monitoring.observers.trajectories.Trajectories",
        note="Set `trainer.trajectories`, and look at them with `rftmega view`.",
        test="tests/unit/monitoring/observers/test_trajectories.py::"
        "test_a_line_says_all_about_its_sample",
    ),
    Row(
        "B10", "workflow", "equivalent", "rftmega.run.api.train",
        note='`rftmega.train("my.yaml")` and `rftmega train my.yaml` run all seven steps.',
        test="tests/e2e/test_api.py::"
        "test_two_ranks_learn_by_a_closure_and_a_lambda_of_a_script",
    ),
    Row(
        "B11", "extension points", "equivalent", "rftmega.config.RunConfig.plugins",
        note="Components in a file of yours, named in `plugins`: algorithms, rewards, environments and importance "
        "weights. For another "
        "trainer, override methods of `PPOTrainerVL` or `NaiveExperienceMaker`.",
        test="tests/unit/config/test_plugins.py::test_a_run_learns_by_parts_of_a_users_own",
    ),
)  # fmt: skip

PPO = (
    Row(
        "C01a", "PPOTrainerVL(strategy, actor, critic, reward_model, initial_model)", "implemented",
        TRAINER, "strategy, actor, critic, reward_model, initial_model",
        note="`reward_model` is a `Reward` or a list of them. `initial_model` is the reference; it may be the actor itself. "
        "`critic` is `LightRFTStrategy.critic`, or a `Critic` of it.",
        test=f"{IN_TRAINER}the_kl_s_weight_and_the_clip_are_those_given",
    ),
    Row(
        "C01d", "PPOTrainerVL(critic), Critic", "implemented", "rftmega.lightrft.critic.Critic",
        "model, packing_samples=False, processor=None",
        note="A `Critic` is called like an `ActorVL` and returns values [B, A], with a gradient for `backward`.",
        test=WITH_CRITIC,
    ),
    Row(
        "C01b", "PPOTrainerVL(ema_model)", "rejected", TRAINER, "ema_model",
        note="Pass None. Set `algorithm.ema_beta`, and the policy keeps its own moving average.",
        test=REFUSED,
    ),
    Row(
        "C01c", "PPOTrainerVL(actor_optim, critic_optim, actor_scheduler, critic_scheduler)",
        "equivalent", TRAINER, "actor_optim, critic_optim, actor_scheduler, critic_scheduler",
        note="They are ignored, since models have their own. Set `optimizer.*` and `critic.*`.",
        test=WITH_CRITIC,
    ),
    Row(
        "C02", "PPOTrainerVL(ema_beta)", "equivalent", TRAINER, "ema_beta=0.992",
        note="Set `algorithm.ema_beta`. A value that is neither the default nor the config's raises a `ValueError`.",
        test=REFUSED,
    ),
    Row(
        "C03", "PPOTrainerVL(init_kl_coef, kl_target, kl_horizon)", "implemented", TRAINER,
        "init_kl_coef=0.001, kl_target=None, kl_horizon=10000",
        note="The coefficient is adaptive if you pass a target. `args.use_kl_loss` moves the KL from the rewards into the loss.",
        test=f"{IN_TRAINER}the_kl_s_weight_and_the_clip_are_those_given",
    ),
    Row(
        "C04", "PPOTrainerVL(ptx_coef)", "equivalent", TRAINER, "ptx_coef=0",
        note="Set `algorithm.ptx_coef` and `data.ptx`, and use `rftmega train`. Another value than 0 raises a `ValueError`.",
        test=REFUSED,
    ),
    Row(
        "C05a", "PPOTrainerVL(micro_train_batch_size)", "equivalent", TRAINER, "micro_train_batch_size=8",
        note="Set `trainer.max_tokens_per_micro_batch`. A value that is neither the default nor the config's raises a "
        "`ValueError`.",
        test=REFUSED,
    ),
    Row(
        "C05b", "PPOTrainerVL(buffer_limit)", "implemented", TRAINER, "buffer_limit=0",
        note="It counts rows; 0 is unlimited. The oldest experiences leave first.",
        test=f"{IN_TRAINER}the_oldest_rows_leave_a_buffer_with_a_limit_and_checkpoints_can_be_left_out",
    ),
    Row(
        "C05c", "PPOTrainerVL(buffer_cpu_offload)", "equivalent", TRAINER, "buffer_cpu_offload=True",
        note="It has no effect: the buffer is always on the host.",
        test=f"{IN_TRAINER}where_the_buffer_lies_changes_nothing",
    ),
    Row(
        "C05d", "PPOTrainerVL(micro_rollout_batch_size)", "implemented", TRAINER,
        "micro_rollout_batch_size=8",
        note="It is the size of the batches of `generate_samples`. The engine gets all prompts at once.",
        test=f"{IN_TRAINER}a_fit_pushes_rolls_out_learns_and_saves_and_goes_on_where_it_was",
    ),
    Row(
        "C06a", "PPOTrainerVL(eps_clip)", "implemented", TRAINER, "eps_clip=0.2",
        test=f"{IN_TRAINER}the_kl_s_weight_and_the_clip_are_those_given",
    ),
    Row(
        "C06b", "PPOTrainerVL(value_clip)", "implemented", TRAINER, "value_clip=0.2",
        test=WITH_CRITIC,
    ),
    Row(
        "C07a", "PPOTrainerVL(gradient_checkpointing)", "equivalent", TRAINER,
        "gradient_checkpointing=False",
        note="Set `parallel.recompute`. A value that is neither the default nor the config's raises a `ValueError`.",
        test=REFUSED,
    ),
    Row(
        "C07b", "PPOTrainerVL(max_epochs)", "implemented", TRAINER, "max_epochs=1",
        test=f"{IN_TRAINER}the_buffer_is_trained_from_as_often_as_asked_in_steps_of_the_batch_s_size",
    ),
    Row(
        "C07c", "PPOTrainerVL(max_norm)", "equivalent", TRAINER, "max_norm=1.0",
        note="Set `optimizer.clip_grad`. A value that is neither the default nor the config's raises a `ValueError`.",
        test=REFUSED,
    ),
    Row(
        "C07d", "PPOTrainerVL(prompt_max_len)", "implemented", TRAINER, "prompt_max_len=128",
        note="Text prompts are truncated to it. A longer prompt with images raises a `ValueError`.",
        test=f"{IN_MAKER}answers_come_in_batches_siblings_side_by_side_whatever_the_size_of_a_batch",
    ),
    Row(
        "C07e", "PPOTrainerVL(dataloader_pin_memory)", "equivalent", TRAINER,
        "dataloader_pin_memory=True",
        note="It has no effect: batches are moved to the device without a data loader.",
        test=f"{IN_TRAINER}where_the_buffer_lies_changes_nothing",
    ),
    Row(
        "C08a", "PPOTrainerVL(tokenizer)", "implemented", TRAINER, "tokenizer",
        note="A tokenizer of rftmega or of transformers.", test=LOOP_WITH_IMAGES,
    ),
    Row(
        "C08b", "PPOTrainerVL(processor)", "implemented", TRAINER, "processor",
        note="None means the strategy's own.", test=LOOP_WITH_IMAGES,
    ),
    Row(
        "C08c", "PPOTrainerVL(remote_rm_url)", "rejected", TRAINER, "remote_rm_url",
        note="Pass a `Reward` that asks your server as `reward_model`.", test=REFUSED,
    ),
    Row(
        "C08d", "PPOTrainerVL(reward_fn, reward_fn_label_map, reward_recipe)", "implemented", TRAINER,
        "reward_fn, reward_fn_label_map, reward_recipe",
        note="`reward_fn` gets one tensor [B] per reward model, and returns [B]. If you pass a map or a recipe, it "
        "also gets `label_map`, "
        "`recipe` and `labels`.",
        test=WITH_CRITIC,
    ),
    Row(
        "C09a", "PPOTrainerVL(save_hf_ckpt)", "implemented", TRAINER, "save_hf_ckpt=False",
        note="It also saves folders in the Hugging Face format, in `args.save_path`.",
        test=WITH_CRITIC,
    ),
    Row(
        "C09b", "PPOTrainerVL(disable_ds_ckpt)", "implemented", TRAINER, "disable_ds_ckpt=False",
        note="It saves no training checkpoints.",
        test=f"{IN_TRAINER}the_oldest_rows_leave_a_buffer_with_a_limit_and_checkpoints_can_be_left_out",
    ),
    Row(
        "C09c", "PPOTrainerVL(**generate_kwargs)", "implemented", TRAINER, "**generate_kwargs",
        note="You may pass the options of `generate_samples`. Others raise a `ValueError` that names the config option.",
        test=f"{IN_TRAINER}a_fit_pushes_rolls_out_learns_and_saves_and_goes_on_where_it_was",
    ),
    Row(
        "C10", "PPOTrainerVL.evaluate", "implemented", f"{TRAINER}.evaluate",
        "eval_dataloader, global_step", "dict of metrics",
        "It generates one greedy completion per prompt, and returns `eval_reward` and `eval_response_length`.",
        WITH_IMAGES,
    ),
    Row(
        "C11", "PPOTrainerVL.fit", "implemented", f"{TRAINER}.fit",
        "args, prompts_dataloader, pretrain_dataloader, eval_dataloader=None, consumed_samples=0, "
        "num_update_steps_per_episodes=1",
        "None",
        "Pass None as `pretrain_dataloader`; for supervised loss, set `algorithm.ptx_coef` and use `rftmega train`.",
        f"{IN_TRAINER}a_fit_pushes_rolls_out_learns_and_saves_and_goes_on_where_it_was",
    ),
    Row(
        "C12", "PPOTrainerVL.ppo_train", "implemented", f"{TRAINER}.ppo_train", "global_steps=0",
        "dict of mean metrics",
        "`global_steps` determines the order of rows after the first epoch.",
        f"{IN_TRAINER}the_buffer_is_trained_from_as_often_as_asked_in_steps_of_the_batch_s_size",
    ),
    Row(
        "C13", "PPOTrainerVL.save_logs_and_checkpoints", "implemented",
        f"{TRAINER}.save_logs_and_checkpoints",
        "args, global_step, step_bar, logs_dict=None, client_states=None, episode=0", "None",
        "Metrics are printed, and written to TensorBoard in the folder `args.use_tensorboard` and to wandb with "
        "`args.use_wandb`. None means an empty dict, and `step_bar` is ignored.",
        f"{IN_TRAINER}metrics_are_written_to_tensorboard_and_wandb_as_the_arguments_ask",
    ),
    Row(
        "C14", "PPOTrainerVL.training_step", "implemented", f"{TRAINER}.training_step",
        "experience, global_steps, entropy_mask=None", "dict of metrics",
        "`global_steps` is ignored.", WITH_CRITIC,
    ),
    Row(
        "C15a", "PPOTrainerVL.training_step_actor", "implemented", f"{TRAINER}.training_step_actor",
        "experience, entropy_mask=None", "dict of metrics",
        "Only tokens where `entropy_mask` is true count in the loss.",
        f"{IN_TRAINER}an_entropy_mask_keeps_tokens_out_of_the_loss",
    ),
    Row(
        "C15b", "PPOTrainerVL.training_step_critic", "implemented", f"{TRAINER}.training_step_critic",
        "experience", "dict of metrics", test=WITH_CRITIC,
    ),
)  # fmt: skip

EXPERIENCE = (
    Row(
        "D01", "Experience", "implemented", f"{PADDED}.Experience",
        "sequences, action_log_probs, base_action_log_probs, values, returns, advantages, attention_mask, action_mask, info, "
        "kl=None, action_entropy=None",
        note="Prompts are padded on the left. Images and videos are further fields.",
        test=f"{IN_PADDED}constructors_take_what_users_of_lightrft_give_in_their_order",
    ),
    Row(
        "D02a", "Experience.to_device", "implemented", f"{PADDED}.Experience.to_device", "device",
        "itself", test=f"{IN_PADDED}every_tensor_moves_to_a_device",
    ),
    Row(
        "D02b", "Experience.pin_memory", "implemented", f"{PADDED}.Experience.pin_memory",
        returns="itself", note="Without a GPU it changes nothing.",
        test=f"{IN_PADDED}every_tensor_is_pinned_and_nothing_else",
    ),
    Row(
        "D03", "Experience.action_entropy", "implemented", f"{PADDED}.Experience.action_entropy",
        note="Make an `entropy_mask` from it, to train on tokens of high entropy only. `rftmega train` has "
        "`algorithm.high_entropy_share`.",
        test=f"{IN_MAKER}an_experience_holds_what_policy_critic_reward_and_engine_say_of_each_token",
    ),
    Row(
        "D04", "Samples", "implemented", f"{PADDED}.Samples",
        "sequences, attention_mask, action_mask, num_actions, packed_seq_lens, response_length, total_length, "
        "prompts, labels, pad_len",
        note="In packed samples, `attention_mask` has the number of each token's sequence, from 1 on. 0 is padding.",
        test=f"{IN_PADDED}packed_answers_stand_behind_each_other_without_padding_but_at_the_end",
    ),
    Row(
        "D05", "NaiveExperienceMaker", "implemented", MAKER,
        "actor, critic, reward_model, initial_model, tokenizer, prompt_max_len, kl_controller, strategy=None, remote_rm_url, "
        "reward_fn, reward_fn_label_map, reward_recipe",
        note="Without a strategy the actor generates completions itself. `remote_rm_url` raises a `ValueError`: pass a `Reward`.",
        test=f"{IN_MAKER}several_rewards_are_combined_by_the_function_given",
    ),
    Row(
        "D06", "NaiveExperienceMaker.generate_samples", "implemented", f"{MAKER}.generate_samples",
        "all_prompts, **kw", "list of `Samples`",
        "Unknown options raise a `ValueError`.",
        f"{IN_MAKER}answers_come_in_batches_siblings_side_by_side_whatever_the_size_of_a_batch",
    ),
    Row(
        "D07", "NaiveExperienceMaker.make_experience", "implemented", f"{MAKER}.make_experience",
        "samples", "`Experience` without advantages and returns",
        test=f"{IN_MAKER}an_experience_holds_what_policy_critic_reward_and_engine_say_of_each_token",
    ),
    Row(
        "D08", "NaiveExperienceMaker.make_experience_list", "implemented",
        f"{MAKER}.make_experience_list", "all_prompts, **kw", "list of `Experience`",
        "Each completion is scored once. Advantages are not whitened.",
        f"{IN_MAKER}generation_scoring_shaping_and_advantages_follow_each_other",
    ),
    Row(
        "D09", "NaiveExperienceMaker.process_experiences", "implemented",
        f"{MAKER}.process_experiences", "experiences", "(experiences, rewards of each)",
        "Override it to filter experiences. Rewards are shaped over all batches at once.",
        f"{IN_MAKER}generation_scoring_shaping_and_advantages_follow_each_other",
    ),
    Row(
        "D10", "NaiveExperienceMaker.get_advantages_and_returns", "implemented",
        f"{MAKER}.get_advantages_and_returns", "values, rewards, action_mask, gamma, lambd",
        "(advantages, returns)",
        "Tokens outside the mask are skipped, and have advantage 0. `make_experience_list` clips advantages to the "
        "option `advantage_clip`.",
        f"{IN_MAKER}advantages_and_returns_are_the_documented_sums",
    ),
    Row(
        "D10b", "info['clip_frac']", "implemented",
        "rftmega.lightrft.naive_experience_maker.clipped_advantages",
        "advantages, action_mask, bound", "(advantages, share of clipped tokens [B])",
        test=f"{IN_MAKER}clipped_advantages_are_told_as_the_share_of_a_responses_tokens",
    ),
    Row(
        "D11", "NaiveExperienceMaker.get_cumulative_returns", "implemented",
        f"{MAKER}.get_cumulative_returns", "rewards, action_mask, gamma", "one tensor [B, A]",
        test=f"{IN_MAKER}generation_scoring_shaping_and_advantages_follow_each_other",
    ),
    Row(
        "D12", "NaiveExperienceMaker.tokenize_fn", "implemented", f"{MAKER}.tokenize_fn",
        "texts, max_length, padding=True, device=None", "dict of tensors, or list of ids without padding",
        test=f"{IN_MAKER}texts_become_left_padded_tensors_or_lists",
    ),
    Row(
        "D13", "clip_filter_like_weight_func", "implemented",
        "rftmega.algorithms.filters.clip_filter_like_weight_func",
        "rewards, clip_filter_like_weight_clip_eps=3.0, lamda=1.0", "weights of the same shape",
        "If the rewards of all groups are equal, all weights are 1.",
        "tests/unit/algorithms/test_filters.py::test_groups_that_differ_make_up_for_those_that_agree",
    ),
    Row(
        "D14a", "pin_memory", "implemented", f"{PADDED}.pin_memory", "tensor", "tensor or list",
        "Without a GPU it changes nothing.",
        f"{IN_PADDED}without_a_device_pinning_changes_nothing",
    ),
    Row(
        "D14b", "to", "implemented", f"{PADDED}.to", "tensor, device", "tensor or list",
        test=f"{IN_PADDED}lists_of_tensors_move_as_tensors_do",
    ),
)  # fmt: skip

ACTORS = (
    Row(
        "E01", "MegatronActor", "implemented", f"{MEGATRON}.MegatronActor",
        "cfg, placement, role='actor'",
        note="`placement` is a `Topology`. The role `reference` only scores. There is no base class MegatronWorker, since the "
        "launcher starts the processes.",
        test=ACTOR_STEPS,
    ),
    Row(
        "E02", "MegatronActor.get_forward_step_func", "implemented",
        f"{MEGATRON}.MegatronActor.get_forward_step_func",
        returns="Megatron's `forward_step_func(data_iterator, model)`",
        note="The iterator yields (Rows, Experience on the device).",
        test=SCHEDULE,
    ),
    Row(
        "E03", "MegatronActor.sync_model_to_rollout", "implemented",
        f"{MEGATRON}.MegatronActor.sync_model_to_rollout", returns="dict of metrics",
        note="The weights have the version of the last `set_global_step`.", test=ACTOR_STEPS,
    ),
    Row(
        "E04", "MegatronModelManager", "implemented", f"{MEGATRON}.MegatronModelManager", "cfg",
        note="Start the process group first. `residency` moves its parts between device and host.",
        test=SCHEDULE,
    ),
    Row(
        "E05", "MegatronModelManager.setup_model_and_optimizer", "implemented",
        f"{MEGATRON}.MegatronModelManager.setup_model_and_optimizer",
        "model_type=ModelType.encoder_or_decoder", "None",
        "Any other model type raises a `ValueError`.",
        "tests/distributed/test_hazards.py::test_what_an_actor_is_not_it_says",
    ),
    Row(
        "E06", "MegatronModelManager.model_provider_func", "implemented",
        f"{MEGATRON}.MegatronModelManager.model_provider_func", "pre_process, post_process",
        "one pipeline chunk, randomly initialised", "Override it to build another model.", SCHEDULE,
    ),
    Row(
        "E07", "MegatronModelManager.make_data_iterator_list", "implemented",
        f"{MEGATRON}.MegatronModelManager.make_data_iterator_list",
        "data_iterator, padding=False, vpp_size=1", "list of `vpp_size` iterators",
        "It is a list also if `vpp_size` is 1. Megatron's schedule without interleaving takes its one item.",
        "tests/distributed/test_custom_forward.py::test_one_iterator_a_chunk_and_padding_to_the_longest",
    ),
    Row(
        "E08", "MegatronModelManager.custom_forward", "implemented",
        f"{MEGATRON}.MegatronModelManager.custom_forward",
        "model, input_ids, attention_mask, position_ids, sequence_parallel, value_model=False, pack_seqs=True, "
        "logits_processor=None, logits_processor_args=None, temperature=1.0, max_batch_seqlen=4096, padding_seqlen=None",
        "logits, values, or the dict of the `logits_processor`",
        "More than `max_batch_seqlen` tokens raise a `ValueError`; None is unlimited. Further keywords for the model are not "
        "accepted.",
        "tests/distributed/test_custom_forward.py::test_logits_come_back_where_the_tokens_were_packed_or_padded",
    ),
    Row(
        "E09a", "MegatronModelManager.offload_megatron_copy_params", "implemented",
        f"{MEGATRON}.MegatronModelManager.offload_megatron_copy_params", "optimizers", "None",
        "It takes one optimizer, a `ChainedOptimizer` or a list.",
        "tests/distributed/test_offload.py::test_copy_params_move_for_a_chain_one_optimizer_or_a_list",
    ),
    Row(
        "E09b", "MegatronModelManager.load_megatron_copy_params", "implemented",
        f"{MEGATRON}.MegatronModelManager.load_megatron_copy_params", "optimizers", "None",
        test="tests/distributed/test_offload.py::"
        "test_copy_params_move_for_a_chain_one_optimizer_or_a_list",
    ),
    Row(
        "E10a", "EmbodiedFSDPActor", "implemented", f"{FSDP}.EmbodiedFSDPActor", "cfg",
        note="`FSDPActor` is the same class. The policy is a language model.", test=ACTOR_STEPS,
    ),
    Row(
        "E10b", "EmbodiedFSDPActor.init_worker", "implemented", f"{FSDP}.EmbodiedFSDPActor.init_worker",
        returns="None", note="With `trainer.offload`, parameters and optimizer state are then on the host.",
        test=ACTOR_STEPS,
    ),
    Row(
        "E11a", "EmbodiedFSDPActor.model_provider_func", "implemented",
        f"{FSDP}.EmbodiedFSDPActor.model_provider_func", returns="the transformers model, without weights",
        note="Override it to change the model's modules.", test=MANAGER_STEPS,
    ),
    Row(
        "E11b", "EmbodiedFSDPActor.sync_model_to_rollout", "implemented",
        f"{FSDP}.EmbodiedFSDPActor.sync_model_to_rollout", returns="dict of metrics",
        note="It returns when the engines have the weights.", test=ACTOR_STEPS,
    ),
    Row(
        "E11c", "EmbodiedFSDPActor.recv_rollout_trajectories", "implemented",
        f"{FSDP}.EmbodiedFSDPActor.recv_rollout_trajectories", "input_channel", "None, awaited",
        "The channel holds `SentRollout`s. Each process takes its portion of the step's rollouts, in any order.",
        ACTOR_STEPS,
    ),
    Row(
        "E11d", "EmbodiedFSDPActor.compute_advantages_and_returns", "implemented",
        f"{FSDP}.EmbodiedFSDPActor.compute_advantages_and_returns", returns="dict of tensors",
        note="`advantages`, `loss_mask`, `prev_logprobs` and `rewards`; also `returns`, `values` and `ref_logprobs` "
        "if they exist.",
        test=ACTOR_STEPS,
    ),
    Row(
        "E11e", "EmbodiedFSDPActor.run_training", "implemented", f"{FSDP}.EmbodiedFSDPActor.run_training",
        returns="dict of metrics", note="It forgets the rollouts afterwards.", test=ACTOR_STEPS,
    ),
    Row(
        "E11f", "EmbodiedFSDPActor.set_global_step", "implemented",
        f"{FSDP}.EmbodiedFSDPActor.set_global_step", "global_step", "None",
        "Call it before `sync_model_to_rollout`, which sends this version.", ACTOR_STEPS,
    ),
    Row(
        "E12a", "FSDPModelManager", "implemented", f"{FSDP}.FSDPModelManager", "cfg, world_size, rank",
        note="`world_size` and `rank` must be those of the process group.", test=MANAGER_STEPS,
    ),
    Row(
        "E12b", "FSDPModelManager.model_provider_func", "implemented",
        f"{FSDP}.FSDPModelManager.model_provider_func", returns="the transformers model, without weights",
        test=MANAGER_STEPS,
    ),
    Row(
        "E12c", "FSDPModelManager.setup_model_and_optimizer", "implemented",
        f"{FSDP}.FSDPModelManager.setup_model_and_optimizer", returns="None",
        note="It sets `optimizer`, `lr_scheduler` and `grad_scaler`; the constructor has already built `model`.",
        test=MANAGER_STEPS,
    ),
    Row(
        "E13", "FSDPModelManager.get_model_state_dict", "implemented",
        f"{FSDP}.FSDPModelManager.get_model_state_dict", "cpu_offload, full_state_dict",
        "dict of tensors",
        "A sharded dict holds plain tensors, this process's rows. A full one on the host is on the first process alone.",
        MANAGER_STEPS,
    ),
    Row(
        "E14a", "FSDPModelManager.load_checkpoint", "implemented", f"{FSDP}.FSDPModelManager.load_checkpoint",
        "load_path", "None", "It loads the latest checkpoint in the folder, whichever layout wrote it.",
        MANAGER_STEPS,
    ),
    Row(
        "E14b", "FSDPModelManager.save_checkpoint", "implemented", f"{FSDP}.FSDPModelManager.save_checkpoint",
        "save_path, step=0", "None", "Every process writes its own shard, to `save_path`/step_<step>.",
        MANAGER_STEPS,
    ),
    Row(
        "E15a", "FSDPModelManager.offload_param_and_grad", "implemented",
        f"{FSDP}.FSDPModelManager.offload_param_and_grad", "offload_grad=False", "None",
        test=MANAGER_STEPS,
    ),
    Row(
        "E15b", "FSDPModelManager.load_param_and_grad", "implemented",
        f"{FSDP}.FSDPModelManager.load_param_and_grad", "device_id, load_grad=False", "None",
        "A device that is not this process's raises a `ValueError`.", MANAGER_STEPS,
    ),
    Row(
        "E15c", "FSDPModelManager.offload_optimizer", "implemented",
        f"{FSDP}.FSDPModelManager.offload_optimizer", returns="None", test=MANAGER_STEPS,
    ),
    Row(
        "E15d", "FSDPModelManager.load_optimizer", "implemented", f"{FSDP}.FSDPModelManager.load_optimizer",
        "device_id", "None", "A device that is not this process's raises a `ValueError`.",
        MANAGER_STEPS,
    ),
    Row(
        "E16", "FSDPModelManager.optimizer_step", "implemented", f"{FSDP}.FSDPModelManager.optimizer_step",
        returns="(gradient norm, learning rate of each group)",
        note="If the gradients are not finite, the step is skipped, and the norm is NaN.",
        test=MANAGER_STEPS,
    ),
    Row(
        "E17a", "FSDPModelManager.build_lr_scheduler", "implemented",
        f"{FSDP}.FSDPModelManager.build_lr_scheduler", "optimizer, optim_config", "a `LambdaLR`",
        "It reads `schedule`, `warmup_steps` and `min_learning_rate` of `optimizer.*`.", MANAGER_STEPS,
    ),
    Row(
        "E17b", "FSDPModelManager.build_optimizer", "implemented",
        f"{FSDP}.FSDPModelManager.build_optimizer", "model, enable_critic_warmup=False", "an AdamW optimizer",
        "`enable_critic_warmup=True` raises a `ValueError`: set `critic.warmup_steps`.", MANAGER_STEPS,
    ),
    Row(
        "E17c", "FSDPModelManager.build_grad_scaler", "implemented",
        f"{FSDP}.FSDPModelManager.build_grad_scaler", "enabled, **kwargs", "a `ShardedGradScaler`",
        "The manager's own is disabled, since models compute in float32 or bfloat16.", MANAGER_STEPS,
    ),
    Row(
        "E18", "FSDPModelManager.before_micro_batch", "implemented",
        f"{FSDP}.FSDPModelManager.before_micro_batch", "model, is_last_micro_batch", "a context manager",
        "Gradients are exchanged in the backward pass of the last micro-batch only, as with FSDP2 in RLinf.",
        MANAGER_STEPS,
    ),
)  # fmt: skip

ROWS: tuple[Row, ...] = (*STRATEGY, *OVERVIEW, *PPO, *EXPERIENCE, *ACTORS)

SYSTEMS = {
    "LightRFT": {
        "A": "`strategy_base`",
        "B": "Project overview",
        "C": "`PPOTrainerVL`",
        "D": "`experience_maker`",
    },
    "RLinf": {"E": "Actor interface"},
}


def names_page(system: str) -> str:
    """Returns the page of the documented names of `system`, a key of SYSTEMS, in Markdown."""
    head = (
        f"# {system}'s names\n\nEvery name of {system}'s documentation, and the object here that corresponds to it. A name is "
        "`implemented` if you call it as documented, `equivalent` if another object or option does the same, and `rejected` if "
        "it raises an error that says why. A test checks names, parameters and defaults, and calls each of them.\n\n"
    )
    return head + page(system)


def page(system: str) -> str:
    """Returns the Markdown tables of the documented names of `system`, a key of SYSTEMS: a heading
    and a table per page of that system's documentation.
    """
    parts = []
    for letter, title in SYSTEMS[system].items():
        lines = [f"## {title}", "", "| Name | Status | Here | Note |", "|---|---|---|---|"]
        lines += [_line(row) for row in ROWS if row.id.startswith(letter)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _line(row: Row) -> str:
    name = f"`{row.name}`" if row.status == "implemented" or "(" in row.name else row.name
    where = f"`{row.where}`" if row.where else ""
    return f"| {name} | {row.status} | {where} | {row.note} |"
