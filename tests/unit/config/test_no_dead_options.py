"""Every option changes what a run does, and is refused where nothing would read it."""

import ast
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import certifi
import pytest

from rftmega.config import RunConfig, load
from rftmega.config.plugins import plugin_parts
from rftmega.config.tree import options, unions, walk
from rftmega.config.validation import violations
from rftmega.core.errors import ConfigError
from rftmega.data.chat.template import Chat
from tests.tiny_models import save_tiny
from tests.unit.config.observed import (
    averaged,
    built,
    engine,
    given_size,
    program,
    schedule,
    shares,
    stepping,
    taught_by,
    transformer,
    update,
    value_model,
)
from tests.unit.config.overridden import leads, overridden

ROOT = Path(__file__).parents[3]
ROLLOUTS = ("rollout.engine=scripted", "rollout.samples_per_prompt=4", "trainer.trajectories=0")
ROUNDS = "algorithm.dynamic_sampling.max_rounds={}"
CLIPPING = ("clip", "gspo", "cispo", "cpgd")
GAE = ("algorithm.advantage=gae",)
EVAL = ("data.eval={eval}",)
SAMPLED = (*EVAL, "trainer.eval_samples=3", "trainer.eval_temperature=1")
KL = ("algorithm.kl.coef=0.5",)
STEPS = ("algorithm.updates_per_epoch=2",)  # the second of them sees ratios other than 1
PIPELINE = ("parallel.pipeline=2",)
REMOTE = ("reward.remote=1", "reward.remote_url=http://127.0.0.1:9")
JUDGE = ("reward.judge=1", "reward.judge_url=http://127.0.0.1:9", "reward.judge_model=wise")
VLLM = ("rollout.engine=vllm",)
PTX = ("data.ptx={ptx}", "algorithm.ptx_coef=0.5")
SFT = (
    "algorithm.task=sft",
    "rollout.samples_per_prompt=8",
    "rollout.engine=vllm",
    "trainer.trajectories=10",
)
PAIRS = ("algorithm.task=reward_model", *SFT[1:])
NUMBERED = (*PAIRS, "data.chosen_key=safer_response_id")
PREFER = ("algorithm.task=preference", *SFT[1:])
SINGLE = (*PREFER, "algorithm.preference=kto", "data.desirable_key=good")
KINDS = ("reward.recipe={{a: {{exact_match: 1}}, b: {{exact_match: 3}}}}",)
MAJORITY = ("reward.majority=true",)
OVERLAP = ("optimizer.distributed=true", "optimizer.overlap_grad_reduce=true")


@dataclass(frozen=True)
class Live:
    """`to` is another value of an option, which `seen` shows under `under` (on `processes`); under
    `dead` it is refused.
    """

    to: str
    under: Sequence[str] = ()
    seen: Callable[[RunConfig], Any] = program
    processes: int = 1
    dead: Sequence[str] | None = None


def of_critic(live: Live) -> Live:
    under = [
        *GAE,
        *(
            f"critic.{option}" if option.startswith(("parallel", "optimizer")) else option
            for option in live.under
        ),
    ]
    return Live(
        live.to, under, lambda config: live.seen(value_model(config)), live.processes, dead=()
    )


def parts_known(config: RunConfig) -> list[str]:
    return list(unions(plugin_parts(config.plugins))["algorithm.advantage"])


LAYOUT = {
    "tensor": Live("2", seen=transformer, processes=8),
    "pipeline": Live("2", seen=transformer, processes=8),
    "sequence": Live("true", ("parallel.tensor=2",), transformer, 8, dead=()),
    "virtual_pipeline": Live("2", PIPELINE, transformer, 8, dead=()),
    "first_stage_layers": Live("1", PIPELINE, transformer, 8, dead=()),
    "last_stage_layers": Live("1", PIPELINE, transformer, 8, dead=()),
    "context": Live("2", seen=transformer, processes=8),
    "expert": Live("2", ("model.path={moe}",), transformer, 8),
    "expert_tensor": Live(
        "2", ("model.path={moe}", "parallel.tensor=2", "parallel.sequence=true"), transformer, 8
    ),
    "recompute": Live("full", seen=transformer),
}
ADAM = {
    "learning_rate": Live("1e-3", seen=stepping),
    "min_learning_rate": Live("1e-7", ("optimizer.schedule=linear",), stepping, dead=()),
    "schedule": Live("cosine", seen=stepping),
    "warmup_steps": Live("2", seen=stepping),
    "weight_decay": Live("0.5", seen=stepping),
    "beta1": Live("0.5", seen=stepping),
    "beta2": Live("0.5", seen=stepping),
    "epsilon": Live("1e-4", seen=stepping),
    "clip_grad": Live("0.5", seen=stepping),
    "distributed": Live("false", seen=stepping),
    "overlap_grad_reduce": Live("true", seen=stepping),
    "overlap_param_gather": Live("true", OVERLAP, stepping, dead=()),
}
SEPARATE = (*VLLM, "strategy=separate")
NETWORK = ("rollout.transport=network",)
DRAFTING = ("rollout.speculative=draft_model", "rollout.speculative.path={policy}")


OPTIONS: dict[str, Live] = {
    "strategy": Live("separate", VLLM, built),
    "model.path": Live("{moe}", seen=transformer),
    "model.dtype": Live("bfloat16", seen=transformer),
    "model.trust_remote_code": Live("true"),
    "model.dropout": Live("0.5", seen=transformer),
    "model.fp8": Live("blockwise", ("model.dtype=bfloat16",), transformer),
    **{f"parallel.{name}": live for name, live in LAYOUT.items()},
    **{f"optimizer.{name}": live for name, live in ADAM.items()},
    "rollout.engine": Live("vllm", seen=engine),
    "rollout.tensor": Live("2", VLLM, partial(engine, processes=2), 2, dead=("rollout.engine=scripted",)),
    "rollout.servers": Live("2", (*VLLM, "strategy=separate"), engine, dead=()),
    "rollout.transport": Live("network", SEPARATE, engine, dead=()),
    "rollout.addresses": Live("[http://127.0.0.1:8100]", (*SEPARATE, *NETWORK), engine, dead=("strategy=colocated",)),
    "rollout.server_list": Live("{server_list}", (*SEPARATE, *NETWORK), engine, dead=("strategy=colocated",)),
    "rollout.tls_ca": Live(
        "{certificates}", (*SEPARATE, *NETWORK, "rollout.server_list={server_list}"), engine, dead=("rollout.server_list=",)
    ),
    "rollout.listen": Live("10.0.0.1", (*SEPARATE, *NETWORK), engine, dead=("rollout.transport=disk",)),
    "rollout.weights_folder": Live("elsewhere", (*SEPARATE, "rollout.transport=disk"), engine, dead=NETWORK),
    "rollout.ahead": Live("1", (*SEPARATE, "trainer.max_staleness=1"), schedule, dead=()),
    "rollout.on_update": Live("keep", (*SEPARATE, "trainer.max_staleness=2"), update, dead=("rollout.ahead=1",)),
    "rollout.order": Live("{order}", (*SEPARATE, "trainer.max_staleness=2"), schedule, dead=("rollout.ahead=1",)),
    "trainer.max_staleness": Live("1", SEPARATE, schedule, dead=("rollout.engine=transformers",)),
    "rollout.samples_per_prompt": Live("3"),
    "rollout.temperature": Live("0.5"),
    "rollout.max_prompt_tokens": Live("3", ("data.too_long=drop",)),
    "rollout.max_response_tokens": Live("3"),
    "rollout.memory_fraction": Live("0.25", VLLM, partial(engine, kind="cuda"), dead=("rollout.engine=transformers",)),
    "rollout.cpu_cache_gib": Live("0.5", VLLM, engine, dead=("rollout.engine=scripted",)),
    "rollout.max_batch": Live("4", VLLM, engine, dead=("rollout.engine=transformers",)),
    "rollout.speculative.type": Live("lookup", VLLM, engine, dead=("rollout.engine=transformers",)),
    **{
        f"rollout.speculative.{name} of lookup": Live(value, (*VLLM, "rollout.speculative=lookup"), engine, dead=None)
        for name, value in {"draft_tokens": "3", "least_acceptance": "0.7", "most_rows": "5"}.items()
    },
    **{
        f"rollout.speculative.{name} of draft_model": Live(value, (*VLLM, *DRAFTING), engine, dead=None)
        for name, value in {"draft_tokens": "3", "path": "{moe}"}.items()
    },
    "data.train": Live("{other}"),
    "data.sources": Live("{{{train}: 1, {other}: 3}}", ("data.train=", "data.sources={{{train}: 1, {other}: 1}}")),
    "data.eval": Live("{eval}"),
    "data.evals": Live("{{a: {eval}}}"),
    "data.ptx": Live("{other_ptx}", PTX, dead=()),
    "data.prompt_key": Live("question"),
    "data.alpaca_input_key": Live("letter"),
    "data.columns": Live("{{chosen: answer}}", ("reward.functions=[{functions}:shorter]",), dead=()),
    "data.label_key": Live("answer", dead=("algorithm.task=sft",)),
    "data.kind_key": Live("sort", KINDS, dead=()),
    "data.response_key": Live("answer", SFT, dead=()),
    "data.chosen_key": Live("answer", PAIRS, dead=()),
    "data.rejected_key": Live("answer", PAIRS, dead=()),
    "data.desirable_key": Live("fair", SINGLE, dead=PREFER),
    "data.chat_template": Live("true"),
    "data.system_prompt": Live("2"),
    "data.chat_template_kwargs": Live("{{a: 1}}"),
    "data.chat_template_file": Live("{train}"),
    "data.keep_reasoning": Live("true", seen=lambda config: Chat.of(config.data)),
    "data.control_tokens": Live("control"),
    "data.too_long": Live("drop", ("rollout.max_prompt_tokens=3",)),
    "reward.exact_match": Live("2", dead=MAJORITY),
    "reward.exact_match_ignore_case": Live("true", dead=("algorithm.task=sft",)),
    "reward.exact_match_numeric": Live("true", dead=("algorithm.task=sft",)),
    "reward.answer_pattern": Live("1", dead=("algorithm.task=sft",)),
    "reward.reasoning_markers": Live("['1', '2']", dead=("algorithm.task=sft",)),
    "reward.format": Live("1", ("reward.format_pattern=1+",), dead=MAJORITY),
    "reward.format_pattern": Live("2+", ("reward.format=1", "reward.format_pattern=1+"), dead=()),
    "reward.math": Live("1", dead=MAJORITY),
    "reward.math_seconds": Live("1", ("reward.math=1",), dead=()),
    "reward.multiple_choice": Live("-1", ("data.label_key=letter",), dead=MAJORITY),
    "reward.code": Live("1", ("data.label_key=tests", "reward.exact_match=0", "reward.format=1", "reward.format_pattern=1+"),
                        dead=MAJORITY),
    "reward.code_seconds": Live("1", ("data.label_key=tests", "reward.code=1"), dead=()),
    "reward.code_memory_mib": Live("64", ("data.label_key=tests", "reward.code=1"), dead=()),
    "reward.code_tests_inside": Live("true", ("data.label_key=tests", "reward.code=1"), dead=()),
    "reward.workers": Live("3", ("reward.math=1",), dead=()),
    "reward.task_library": Live("1", ("reward.exact_match=2",), dead=MAJORITY),
    "reward.remote": Live("1", REMOTE[1:], dead=MAJORITY),
    "reward.remote_url": Live("http://localhost:8", REMOTE, dead=()),
    "reward.remote_timeout": Live("3", REMOTE, dead=()),
    "reward.remote_retries": Live("0", REMOTE, dead=()),
    "reward.remote_batch": Live("3", REMOTE, dead=()),
    "reward.judge": Live("1", JUDGE[1:], dead=MAJORITY),
    "reward.judge_url": Live("http://localhost:8", JUDGE, dead=()),
    "reward.judge_model": Live("wiser", JUDGE, dead=()),
    "reward.judge_key_env": Live("HOME", JUDGE, dead=()),
    "reward.judge_template": Live("{{completion}}", JUDGE, dead=()),
    "reward.judge_pattern": Live("2", JUDGE, dead=()),
    "reward.judge_scale": Live("[1,2]", JUDGE, dead=()),
    "reward.judge_temperature": Live("0.5", JUDGE, dead=()),
    "reward.judge_max_tokens": Live("3", JUDGE, dead=()),
    "reward.judge_timeout": Live("3", JUDGE, dead=()),
    "reward.judge_retries": Live("0", JUDGE, dead=()),
    "reward.judge_per_second": Live("3", JUDGE, dead=()),
    "reward.judge_concurrency": Live("3", JUDGE, dead=()),
    "reward.judge_cache": Live("{folder}/judged.jsonl", JUDGE, dead=()),
    "reward.model": Live("1", ("reward.model_path={moe}",), dead=("algorithm.task=sft",)),
    "reward.model_path": Live("{moe}", ("reward.model=1", "reward.model_path={policy}"), lambda c: value_model(c).model, dead=()),
    "reward.cost": Live("1", ("reward.cost_path={moe}",), dead=("algorithm.task=sft",)),
    "reward.cost_path": Live("{moe}", ("reward.cost=1", "reward.cost_path={policy}"), lambda c: value_model(c).model, dead=()),
    "reward.majority": Live("true", dead=("algorithm.task=sft",)),
    "reward.functions": Live("[{functions}:shorter]", dead=MAJORITY),
    "reward.function_weights": Live("[2]", ("reward.functions=[{functions}:shorter]",), dead=()),
    "reward.recipe": Live("{{a: {{exact_match: 1}}, b: {{exact_match: 3}}}}", dead=MAJORITY),
    "algorithm.recipe": Live("dr_grpo"),
    "algorithm.task": Live("reward_model", SFT),
    "algorithm.reward_model_loss": Live("cost", NUMBERED, dead=("algorithm.task=sft",)),
    "algorithm.preference.type": Live("ipo", PREFER, dead=()),
    "algorithm.preference.beta of dpo": Live("0.5", PREFER),
    "algorithm.preference.label_smoothing of dpo": Live("0.2", PREFER),
    "algorithm.preference.nll_coef of dpo": Live("0.5", PREFER),
    "algorithm.preference.beta of ipo": Live("0.5", PREFER),
    "algorithm.preference.beta of simpo": Live("0.5", PREFER),
    "algorithm.preference.gamma of simpo": Live("0.5", PREFER),
    "algorithm.preference.beta of kto": Live("0.5", PREFER),
    "algorithm.preference.desirable_weight of kto": Live("0.5", PREFER),
    "algorithm.preference.undesirable_weight of kto": Live("0.5", PREFER),
    "algorithm.preference.coef of orpo": Live("0.5", PREFER),
    "algorithm.advantage.type": Live("leave_one_out", dead=("algorithm.task=sft",)),
    "algorithm.advantage.scale_by_std of group_norm": Live("false"),
    "algorithm.advantage.clip_filter_weight of group_norm": Live("3"),
    "algorithm.advantage.scale_by_std of turn_norm": Live("false"),
    "algorithm.advantage.gamma of reinforce": Live("0.5"),
    "algorithm.advantage.gamma of gae": Live("0.5"),
    "algorithm.advantage.lam of gae": Live("0.5"),
    "algorithm.whiten": Live("true"),
    "algorithm.ema_beta": Live("0.5", seen=averaged, dead=("trainer.export=false",)),
    "algorithm.drop_truncated": Live("true"),
    "algorithm.dynamic_sampling.max_rounds": Live("1"),
    "algorithm.dynamic_sampling.metric": Live(
        "exact_match", (ROUNDS.format(2), "reward.format=1", "reward.format_pattern=1+"), dead=()
    ),
    "algorithm.dynamic_sampling.oversample": Live("1.5", (ROUNDS.format(1),), dead=()),
    "algorithm.replay.max_age": Live("1", ("algorithm.importance_sampling=token",), dead=()),
    "algorithm.replay.max_rows": Live("4", ("algorithm.importance_sampling=token", "algorithm.replay.max_age=2"), dead=()),
    "algorithm.policy_loss.type": Live("reinforce", STEPS),
    **{f"algorithm.policy_loss.low of {part}": Live("0.001", STEPS) for part in CLIPPING},
    **{f"algorithm.policy_loss.high of {part}": Live("0.001", STEPS) for part in CLIPPING},
    "algorithm.policy_loss.dual of clip": Live("1.0001", STEPS),
    "algorithm.policy_loss.drift_coef of cpgd": Live("1", STEPS),
    "algorithm.policy_loss.drift_clip of cpgd": Live(
        "0.001", (*STEPS, "algorithm.policy_loss.drift_coef=1"), dead=("algorithm.policy_loss=cpgd",)
    ),
    "algorithm.policy_loss.tau_positive of sapo": Live("3", STEPS),
    "algorithm.policy_loss.tau_negative of sapo": Live("3", STEPS),
    "algorithm.policy_loss.low of gmpo": Live("0.001", STEPS),
    "algorithm.policy_loss.high of gmpo": Live("0.001", STEPS),
    "algorithm.policy_loss.low of dppo": Live("0.001", STEPS),
    "algorithm.policy_loss.high of dppo": Live("0.001", STEPS),
    "algorithm.policy_loss.drift_coef of dppo": Live("1", STEPS),
    "algorithm.policy_loss.threshold of ipo": Live("0.001", STEPS),
    "algorithm.policy_loss.drift_coef of ipo": Live("1", STEPS),
    "algorithm.advantage.k of pass_at_k": Live("2"),
    "algorithm.importance_sampling.low of icepop": Live("0.99"),
    "algorithm.importance_sampling.high of icepop": Live("1.01"),
    "algorithm.importance_sampling.type": Live("token"),
    **{f"algorithm.importance_sampling.cap of {part}": Live("1.5") for part in ("token", "mask")},
    "algorithm.importance_sampling.cap of sequence": Live("1", ("rollout.max_response_tokens=1",)),
    "algorithm.high_entropy_share": Live("0.5"),
    "algorithm.loss_aggregation": Live("sequence_mean"),
    "algorithm.kl.placement": Live(
        "reward",
        (*KL, "algorithm.advantage=reinforce", "algorithm.kl.estimator=k2"),
        dead=("algorithm.advantage=reinforce",),
    ),
    "algorithm.kl.coef": Live("0.5"),
    "algorithm.kl.target": Live("0.001", KL, dead=()),
    "algorithm.kl.horizon": Live("20", (*KL, "algorithm.kl.target=0.001"), dead=KL),
    "algorithm.kl.estimator": Live("k2", KL, dead=()),
    "algorithm.teachers": Live("[{{path: {moe}}}]", seen=taught_by, dead=("algorithm.task=sft",)),
    "algorithm.entropy_coef": Live("0.1", STEPS),
    "algorithm.ptx_coef": Live("1", PTX, dead=()),
    "algorithm.on_policy_share": Live(
        "0.5", ("data.ptx={ptx}", "algorithm.teachers=[{{path: {moe}}}]"), seen=given_size, dead=()
    ),
    "algorithm.updates_per_epoch": Live("2"),
    "algorithm.epochs_per_rollout": Live("2"),
    "reward.shaping.clip": Live("0.5"),
    "reward.shaping.normalise": Live("true", ("algorithm.advantage=reinforce",)),
    "reward.shaping.overlong_buffer_share": Live("0.5"),
    "reward.shaping.overlong_penalty_factor": Live("2", ("reward.shaping.overlong_buffer_share=0.5",), dead=()),
    "rollout.train_samples_per_prompt": Live("2"),
    "critic.warmup_steps": Live("1", GAE, dead=()),
    "critic.value_clip": Live("0.001", (*GAE, *STEPS), dead=()),
    "critic.value_huber": Live("0.01", GAE, dead=()),
    "plugins": Live("[{plugin}]", seen=parts_known),
    "environment.type": Live("talk", ("plugins=[{plugin}]",), dead=("algorithm.task=sft", "plugins=[{plugin}]")),
    "checkpoint.every": Live("1"),
    "critic.path": Live("{moe}", GAE, lambda config: value_model(config).model, dead=()),
    **{f"critic.parallel.{name}": of_critic(live) for name, live in LAYOUT.items()},
    **{f"critic.optimizer.{name}": of_critic(live) for name, live in ADAM.items()},
    "trainer.steps": Live("2"),
    "trainer.prompts_per_step": Live("2"),
    "trainer.max_tokens_per_micro_batch": Live("20"),
    "trainer.max_attention_per_micro_batch": Live("300"),
    "trainer.share_prefixes": Live("false", seen=shares),
    "trainer.offload": Live("false", seen=built, dead=("algorithm.task=sft",)),
    "trainer.eval_every": Live("1", EVAL, dead=()),
    "trainer.eval_samples": Live("2", SAMPLED, dead=()),
    "trainer.eval_temperature": Live("0.5", SAMPLED, dead=()),
    "trainer.eval_top_p": Live("0.5", SAMPLED, dead=()),
    "trainer.eval_top_k": Live("3", SAMPLED, dead=()),
    "trainer.eval_min_p": Live("0.5", SAMPLED, dead=()),
    "trainer.eval_pass_at": Live("[2]", SAMPLED, dead=()),
    "trainer.eval_accuracy": Live("format", (*SAMPLED, "trainer.eval_pass_at=[2]", "reward.format=1", "reward.format_pattern=.*"),
                                  dead=("reward.format=1", "reward.format_pattern=.*")),
    "trainer.trajectories": Live("2", dead=("algorithm.task=sft",)),
    "trainer.trajectories_mib": Live("1", ("trainer.trajectories=1",), dead=()),
    "trainer.output": Live("{folder}/elsewhere"),
    "trainer.export": Live("false"),
    "trainer.push_bucket_mib": Live("1", seen=built),
    "trainer.seed": Live("7"),
}  # fmt: skip


CHECKPOINTS = "distributed/test_checkpoints.py"
# what needs several processes, real checkpoints or sockets: a value, the test that shows what it
# does, its word
ELSEWHERE = {
    "model.ignore_config_fields": (
        "[num_mtp_layers]",
        "unit/models/test_known_fields.py",
        "model.ignore_config_fields=",
    ),
    "model.freeze_vision": ("true", "distributed/test_vision.py", "freeze_vision"),
    "optimizer.vision_learning_rate": ("1", "distributed/test_vision.py", "vision_learning_rate"),
    "critic.optimizer.vision_learning_rate": (
        "1",
        "distributed/test_vision.py",
        "vision_learning_rate",
    ),
    **{
        f"model.lora.{name}": (value, "distributed/test_adapters.py", word)
        for name, value, word in (
            ("rank", "8", "rank=RANK"),
            ("alpha", "8", "alpha=ALPHA"),
            ("targets", "[q_proj]", "targets=list(targets)"),
            ("dropout", "0.1", "dropout=share"),
            ("path", "x", "path=str(adapter)"),
            ("rslora", "true", "rslora=rslora"),
            ("base_on_host", "int8", "base_on_host=kept"),
        )
    },
    **{
        f"{model}optimizer.{name}": (value, file, word)
        for model in ("", "critic.")
        for name, value, file, word in (
            ("name", "muon", "distributed/test_muon.py", 'name="muon"'),
            ("states", "bfloat16", CHECKPOINTS, "states=states"),
        )
    },
    "rollout.router_replay": (
        "engine",
        "distributed/test_router_replay.py",
        'router_replay="trainer"',
    ),
    "rollout.quantization": ("fp8", "e2e/test_low_precision.py", "rollout.quantization=fp8"),
    "model.lora.push": ("adapters", "distributed/test_pushed_adapters.py", 'push="adapters"'),
    "model.lora.evaluated": (
        "{{base: ''}}",
        "distributed/test_pushed_adapters.py",
        "evaluated=evaluated",
    ),
    "backend": ("fsdp", "distributed/test_fsdp.py", 'backend="fsdp"'),
    **{
        f"{model}parallel.{name}": (value, "invariance.py", f"{name}=")
        for model in ("", "critic.")
        for name, value in (
            ("replicas", "2"),
            ("reshard_after_forward", "false"),
            ("cpu_offload", "true"),
        )
    },
    "rollout.max_images": ("3", "unit/data/test_prompt_images.py", "max_images=2"),
    "rollout.max_videos": ("3", "unit/data/test_videos.py", "max_videos=1"),
    "data.tools_key": ("functions", "unit/data/test_parts_trained.py", 'tools_key="functions"'),
    "data.trained_turns": ("all", "unit/data/test_parts_trained.py", 'trained_turns="all"'),
    "data.trailing_assistant": (
        "reject",
        "unit/data/chat/test_messages.py",
        'trailing_assistant="reject"',
    ),
    "data.images_key": ("x", "unit/data/test_prompt_images.py", "images_key="),
    "data.videos_key": ("x", "unit/data/test_videos.py", "videos_key="),
    "data.audio_key": ("x", "unit/data/test_waveforms.py", "audio_key="),
    "data.video_fps": ("3", "unit/data/test_videos.py", "video_fps="),
    "data.video_frames": ("3", "unit/data/test_videos.py", "video_frames="),
    "data.media_hosts": ("[a.org]", "unit/data/test_fetched_files.py", "media_hosts="),
    "data.media_folder": ("x", "unit/data/test_prompt_images.py", "media_folder="),
    "trainer.max_patches_per_micro_batch": (
        "3",
        "distributed/test_vision.py",
        "max_patches_per_micro_batch",
    ),
    "model.verify": ("true", "unit/run/test_integrity.py", "verify=True"),
    "checkpoint.folder": ("x", CHECKPOINTS, "folder"),
    "checkpoint.resume": ("auto", "e2e/test_resume.py", "started_again"),
    "checkpoint.keep": ("2", CHECKPOINTS, "keep=2"),
    "checkpoint.keep_mib": ("2", "unit/checkpoints/test_retention.py", "max_mem"),
    "checkpoint.asynchronous": ("false", CHECKPOINTS, "asynchronous=True"),
    "checkpoint.hf": ("true", "e2e/test_resume.py", "checkpoint.hf=true"),
    "checkpoint.on_failure": ("warn", CHECKPOINTS, "warn=True"),
    "logging.timeline": ("[3,9]", "e2e/test_loop.py", "logging.timeline="),
    "logging.peak_tflops": ("0", "distributed/test_measures.py", "peak_tflops"),
    "logging.mlflow": ("", "unit/monitoring/observers/test_publish.py", "MLflow("),
    "logging.trackio": ("", "unit/monitoring/observers/test_publish.py", "Trackio("),
    "logging.wandb": ("", "unit/monitoring/observers/test_publish.py", "wandb"),
    "logging.prometheus_port": ("-1", "unit/monitoring/observers/test_publish.py", "127.0.0.1"),
    "logging.prometheus_host": (
        "0.0.0.0",
        "unit/monitoring/observers/test_publish.py",
        "127.0.0.1",
    ),
    "trainer.eval_shown": ("0", "unit/monitoring/observers/test_evaluation_table.py", "printed=2"),
    "reward.timeout": ("0", "e2e/test_reward_hangs.py", "reward.timeout=2"),
    "rollout.deadline_seconds": ("60", "distributed/test_engine_faults.py", "deadline_seconds="),
    "trainer.push_to_hub": ("mine", "e2e/test_api.py", "trainer.push_to_hub="),
    "trainer.export_quantised": ("true", "distributed/test_weights.py", "quantised=True"),
    "rollout.stop": ("[x]", "distributed/test_sampling.py", "stop=STRINGS"),
    "rollout.max_logprob_gap": ("0.5", "distributed/test_mismatch_gate.py", "max_logprob_gap="),
    "rollout.mean_logprob_gap": ("0.5", "distributed/test_mismatch_gate.py", "mean_logprob_gap="),
    "faults.engine_restarts": ("1", "distributed/test_engine_faults.py", "restarts="),
    "faults.check_replicas_every": (
        "-1",
        "e2e/test_elastic.py",
        "faults.check_replicas_every=1",
    ),
    "faults.max_skipped_steps": ("0", "e2e/test_diverged.py", "faults.max_skipped_steps=2"),
    "faults.max_restarts": ("1", "e2e/test_stop.py", "faults.max_restarts=1"),
    "faults.requeue_code": ("77", "e2e/test_stop.py", "faults.requeue_code=77"),
    "faults.watchdog_seconds": (
        "-1",
        "unit/runtime/parallel/test_progress.py",
        "watchdog_seconds=0.2",
    ),
}
OF_ENVIRONMENTS = {
    "name of python": ("e2e/test_api.py", "environment="),
    "tools of tools": ("unit/environments/test_tools_environment.py", '"tools": ['),
    "max_turns of tools": ("unit/environments/test_tools_environment.py", "max_turns=1"),
    "max_tokens of tools": ("unit/environments/test_tools_environment.py", '"max_tokens": 80'),
    "max_turn_tokens of tools": ("unit/environments/test_tools_environment.py", "max_turn_tokens"),
    "over_limit of tools": ("unit/environments/test_tools_environment.py", "over_limit=over_limit"),
    "sandbox.python of tools": ("unit/environments/tools/test_sandbox_tool.py", "python=True"),
    "sandbox.seconds of tools": ("unit/environments/tools/test_sandbox_tool.py", "seconds=20.0"),
    "sandbox.memory_mib of tools": (
        "unit/environments/tools/test_sandbox_tool.py",
        "memory_mib=512",
    ),
    "sandbox.processor_seconds of tools": (
        "unit/environments/tools/test_sandbox_tool.py",
        "processor_seconds=",
    ),
    "http of tools": ("unit/environments/tools/test_http_tool.py", "HTTPTool("),
    "mcp of tools": ("unit/environments/tools/test_mcp_tool.py", "MCPServer("),
    "limits.seconds of tools": ("unit/environments/tools/test_tool.py", "seconds=0.01"),
    "limits.rollout_seconds of tools": (
        "unit/environments/test_tools_environment.py",
        "rollout_seconds=",
    ),
    "limits.characters of tools": ("unit/environments/tools/test_http_tool.py", "characters="),
    "limits.retries of tools": ("unit/environments/tools/test_tool.py", "retries=2"),
    "limits.pause of tools": ("unit/environments/tools/test_tool.py", "pause=0.001"),
    "function of agent": ("unit/environments/agents/test_openai_endpoint.py", "Agent(function="),
    "command of agent": ("unit/environments/agents/test_openai_endpoint.py", "command=command"),
    "seconds of agent": ("unit/environments/agents/test_openai_endpoint.py", "seconds=8.0"),
    "agent_errors of agent": (
        "unit/environments/agents/test_openai_endpoint.py",
        'agent_errors="score"',
    ),
    "environment of verifiers": ("unit/environments/agents/test_verifiers.py", "environment"),
    "python of verifiers": ("unit/environments/agents/test_verifiers.py", "python"),
    "options of verifiers": ("unit/environments/agents/test_verifiers.py", "options"),
    "seconds of verifiers": ("unit/environments/agents/test_verifiers.py", "seconds"),
    "start_seconds of verifiers": ("unit/environments/agents/test_verifiers.py", "start_seconds"),
    "python of textarena": ("unit/environments/test_text_games.py", "python="),
    "max_turns of textarena": ("unit/environments/test_text_games.py", "max_turns=2"),
    "max_turn_tokens of textarena": ("unit/environments/test_text_games.py", "max_turn_tokens=1"),
    "seconds of textarena": ("unit/environments/test_text_games.py", "seconds=1.0"),
    "start_seconds of textarena": ("unit/environments/test_text_games.py", "start_seconds"),
    "renderer of textarena": ("unit/data/chat/test_renderer.py", "renderer="),
    **{
        f"{name} of openenv": ("unit/environments/test_text_games.py", name)
        for name in ("python", "max_turns", "max_turn_tokens", "seconds", "start_seconds")
    },
    "action_key of openenv": ("unit/environments/test_text_games.py", "action_key"),
    "observation_key of openenv": ("unit/environments/test_text_games.py", "observation_key"),
    "renderer of openenv": ("unit/data/chat/test_renderer.py", "renderer="),
    **{
        f"{name} of {part}": ("unit/data/chat/test_renderer.py", f"{name}=")
        for name in ("renderer", "tool_parser")
        for part in ("tools", "agent", "verifiers")
    },
}
ELSEWHERE |= {f"environment.{name}": ("", *where) for name, where in OF_ENVIRONMENTS.items()}
ELSEWHERE |= {
    "faults.rollout_repeats": ("1", "unit/rollout/pool/test_running_rollouts.py", "repeats=2"),
    "reward.environment": ("{{found: 2}}", "unit/rewards/test_mix.py", "environment={"),
    "rollout.max_running": ("3", "unit/rollout/pool/test_running_rollouts.py", "most_running=2"),
}
# there is no run that does not read them
ALWAYS = {
    "model.ignore_config_fields",
    "optimizer.states",
    "backend",
    "data.images_key",
    "data.videos_key",
    "data.audio_key",
    "data.trailing_assistant",
    "rollout.max_running",
    "model.verify",
    "model.lora.rank",
    "checkpoint.resume",
    "logging.peak_tflops",
    "logging.wandb",
    "trainer.export_quantised",
    "logging.mlflow",
    "logging.trackio",
    *(f"environment.{name}" for name in OF_ENVIRONMENTS),  # there is none without its part
}


PLUGIN = """
from dataclasses import dataclass
from typing import Literal

from rftmega.config.options.parts import Advantage, EnvironmentPart, implements


@dataclass(frozen=True)
class Plain(Advantage):
    type: Literal["plain"] = "plain"


@implements(Plain)
def plain(batch, options):
    return batch.reward[:, None] * batch.mask


@dataclass(frozen=True)
class Talk(EnvironmentPart):
    type: Literal["talk"] = "talk"


@implements(Talk)
class TalkEnvironment:
    def __init__(self, options, tokenizer):
        pass
"""
FUNCTIONS = """
def shorter(prompts, completions, chosen, **columns):
    return [-len(text) - len(other) for text, other in zip(completions, chosen)]
"""


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in braces in the overrides: folders and files."""
    folder = tmp_path_factory.mktemp("options")
    policy, moe = save_tiny(folder / "policy", "qwen3"), save_tiny(folder / "moe", "qwen3-moe")
    files = {}
    for name, shift in (("train", 0), ("other", 1), ("eval", 2), ("ptx", 3), ("other_ptx", 4)):
        records = [
            {
                "prompt": "abcde"[: 2 + (i + shift) % 4], "question": "edcba"[: 1 + (i + shift) % 4],
                "label": "1", "answer": "222", "kind": "ab"[i % 2], "sort": "ba"[i % 2], "letter": "ABC"[i % 3],
                "response": "123"[(i + shift) % 3] * (1 + i % 2), "chosen": "12", "rejected": "2",
                "good": i % 3 > 0, "fair": i % 2 > 0, "response_0": "1", "response_1": "23", "safer_response_id": i % 2,
                "is_response_0_safe": True, "is_response_1_safe": False,
                "tests": json.dumps({"inputs": [""], "outputs": [str(i)]}),
            }
            for i in range(7)
        ]  # fmt: skip
        files[name] = str(folder / f"{name}.jsonl")
        Path(files[name]).write_text("\n".join(map(json.dumps, records)))
    (folder / "my_parts.py").write_text(PLUGIN)
    (folder / "my_rewards.py").write_text(FUNCTIONS)
    (folder / "servers.txt").write_text("http://10.0.0.2:8100\n")
    step = {"step": 1, "taken": [[0]], "versions": [[[0]]], "dropped": []}
    trained = step | {"prompts_per_step": 4, "max_staleness": 2}
    (folder / "trained_order.jsonl").write_text(json.dumps(trained))
    return {
        **files,
        "plugin": str(folder / "my_parts.py"),
        "functions": str(folder / "my_rewards.py"),
        "policy": str(policy),
        "moe": str(moe),
        "folder": str(folder),
        "server_list": str(folder / "servers.txt"),
        "certificates": certifi.where(),
        "order": str(folder / "trained_order.jsonl"),
    }


class Runs:
    """Configs by their overrides, and what is seen of them; each is loaded and looked at once."""

    def __init__(self, names: dict[str, str]):
        self.names = names
        self.loaded: dict[tuple[str, ...], RunConfig] = {}
        self.seen: dict[tuple[Any, tuple[str, ...]], Any] = {}

    def config(self, *overrides: str) -> RunConfig:
        if overrides not in self.loaded:
            self.loaded[overrides] = config_of(self.names, *overrides)
        return self.loaded[overrides]

    def with_another(self, under: Sequence[str], override: str) -> RunConfig:
        filled = override.format(**self.names)
        if leads(filled):
            return config_of(self.names, *under, override)
        return overridden(self.config(*under), filled)

    def before(self, seen: Callable[[RunConfig], Any], under: Sequence[str]) -> Any:
        key = (seen, tuple(under))
        if key not in self.seen:
            self.seen[key] = seen(self.config(*under))
        return self.seen[key]


@pytest.fixture(scope="module")
def runs(names: dict[str, str]) -> Runs:
    return Runs(names)


def config_of(names: dict[str, str], *overrides: str) -> RunConfig:
    path = Path(names["folder"]) / "run.yaml"
    path.write_text(f"""
model: {{path: {names["policy"]}, dtype: float32}}
data: {{train: {names["train"]}}}
rollout: {{max_prompt_tokens: 8, max_response_tokens: 4}}
trainer: {{steps: 3, prompts_per_step: 4, max_tokens_per_micro_batch: 48, output: {names["folder"]}/out}}
""")
    return load(path, [override.format(**names) for override in (*ROLLOUTS, *overrides)])


def named(key: str) -> tuple[Live, str, tuple[str, ...]]:
    """An entry of the table, the option's own name, and the overrides under which it is there and
    read.
    """
    name, _, part = key.partition(" of ")
    chosen = (f"{name.rpartition('.')[0]}={part}",) if part else ()
    return OPTIONS[key], name, (*chosen, *OPTIONS[key].under)


@pytest.mark.parametrize("name", OPTIONS)
def test_changing_an_option_changes_what_is_seen_of_a_run(name: str, runs: Runs) -> None:
    live, name, under = named(name)
    after = runs.with_another(under, f"{name}={live.to}")
    sound = violations(after, live.processes)
    assert sound == [], "the other value must be one that a run can have"
    assert runs.before(live.seen, under) != live.seen(after), f"{name} changes nothing"


@pytest.mark.ranks
@pytest.mark.parametrize("name", OPTIONS)
def test_a_config_with_another_value_is_that_which_is_loaded(
    name: str, runs: Runs, names: dict[str, str]
) -> None:
    live, name, under = named(name)
    override = f"{name}={live.to}"
    assert runs.with_another(under, override) == config_of(names, *under, override)


@pytest.mark.parametrize(
    "seen",
    [program, partial(program, data_parallel=2), transformer, stepping, averaged, built, engine],
)
def test_what_is_seen_does_not_change_by_itself(
    seen: Callable[[RunConfig], Any], names: dict[str, str]
) -> None:
    config = config_of(
        names, *GAE, *SAMPLED, *PTX, *STEPS, "algorithm.ema_beta=0.5", "trainer.trajectories=1"
    )
    assert violations(config, 1) == []
    first, second = ([x for x in seen(config) if "value model" not in str(x)] for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", [name for name, live in OPTIONS.items() if live.dead is not None])
def test_where_nothing_reads_an_option_it_is_refused(name: str, runs: Runs) -> None:
    live, name, _ = named(name)
    assert live.dead is not None
    config = runs.with_another(live.dead, f"{name}={live.to}")
    found = violations(config, live.processes)
    assert any(name.removeprefix("critic.") in reason for reason in found), found


def test_every_option_is_in_the_table() -> None:
    """Those of a part once for each part that has them."""
    known = {f"{option.name} of {option.part}" if option.part else option.name for option in walk()}
    assert known == OPTIONS.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("key", [key for key in OPTIONS if " of " in key])
def test_an_option_of_a_part_is_refused_where_another_is_chosen(
    key: str, names: dict[str, str]
) -> None:
    live, name, under = named(key)
    section, part = name.rpartition(".")[0], key.partition(" of ")[2]
    other = next(
        tag
        for tag, schema in unions()[section].items()
        if name.rpartition(".")[2] not in schema.__dataclass_fields__
    )
    with pytest.raises(
        ConfigError, match=rf"{name}=.* needs {section}.type=.*{part}.*, not {other}"
    ):
        config_of(names, *under[1:], f"{section}={other}", f"{name}={live.to}")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_the_table_can_not_show_is_refused_where_nothing_reads_it_and_used_by_another_test(
    name: str, runs: Runs
) -> None:
    other, file, word = ELSEWHERE[name]
    if name not in ALWAYS:
        found = violations(runs.with_another((), f"{name}={other}"), 1)
        assert any(name in reason for reason in found)
    assert word in (ROOT / "tests" / file).read_text()


def test_every_option_is_read_outside_the_config() -> None:
    """By its name; that it has an effect is what the table shows."""
    read: set[str] = set()
    files = [
        path for unit in ("rftmega", "model_providers") for path in (ROOT / unit).rglob("*.py")
    ]
    for path in [ROOT / "train_rl.py", *files]:
        parts = path.relative_to(ROOT).parts
        if "config" not in parts or "user_code" in parts:
            tree = ast.walk(ast.parse(path.read_text()))
            read |= {
                node.attr
                for node in tree
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            }
    # replaced by what it stands for; a part of `DataConfig.held_out`
    by_config = {"algorithm.recipe", "data.evals", "plugins", "reward.function_weights"}
    by_config |= {"reward.cost"}  # `RewardConfig.scoring_models`
    # read by name, rewards/mix.py
    weights = {f"reward.{part}" for part in RunConfig().reward.parts()}
    assert {
        name for name in options() if name.rpartition(".")[2] not in read
    } <= by_config | weights
