"""Names that an option may take, and the ranges of numbers."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

from rftmega.config.schema import RunConfig

AS_THE_POLICY = ("parallel.", "optimizer.")  # sections that the critic has, too, and takes from there what it is not given
LARGEST = 2**31
CHOICES = {
    "strategy": ("colocated", "separate"),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "parallel.recompute": ("none", "selective", "full"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
    "rollout.engine": ("vllm", "transformers", "scripted"),
    "data.too_long": ("error", "drop"),
    "algorithm.task": ("rl", "sft", "reward_model"),
    "algorithm.advantage": ("group", "leave_one_out", "reinforce", "gae"),
    "algorithm.surrogate": ("ppo", "gspo", "cispo", "cpgd", "reinforce"),
    "algorithm.correction": ("none", "token", "sequence", "mask"),
    "algorithm.weighting": ("token_mean", "sequence_mean", "sequence_sum", "sequence_total"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "checkpoint.on_failure": ("stop", "warn"),
}
AT_LEAST_ONE = (
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.virtual_pipeline",
    "parallel.context",
    "parallel.expert",
    "parallel.expert_tensor",
    "rollout.tensor",
    "rollout.servers",
    "rollout.samples_per_prompt",
    "rollout.max_prompt_tokens",
    "rollout.max_response_tokens",
    "rollout.max_batch",
    "algorithm.mini_batches",
    "algorithm.oversample",
    "algorithm.kl_horizon",
    "checkpoint.keep",
    "faults.max_skipped_steps",
    "trainer.eval_samples",
    "reward.code_memory_mib",
    "reward.workers",
    "reward.remote_batch",
    "trainer.steps",
    "trainer.prompts_per_step",
    "trainer.push_bucket_mib",
    "trainer.trajectories_mib",
)
POSITIVE = (
    "algorithm.drift_clip",
    "algorithm.high_entropy_share",
    "optimizer.epsilon",
    "reward.math_seconds",
    "reward.code_seconds",
    "reward.remote_timeout",
    "reward.timeout",
    "rollout.cpu_cache_gib",
    "rollout.deadline_seconds",
    "rollout.memory_fraction",
    "rollout.temperature",
)
BELOW_ONE = ("algorithm.ema_beta", "model.dropout", "optimizer.beta1", "optimizer.beta2", "rollout.memory_fraction")
NOT_NEGATIVE = (
    "model.dropout",
    "parallel.first_stage_layers",
    "parallel.last_stage_layers",
    "rollout.max_logprob_gap",
    "rollout.mean_logprob_gap",
    "optimizer.learning_rate",
    "optimizer.min_learning_rate",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    "optimizer.clip_grad",
    "optimizer.beta1",
    "optimizer.beta2",
    "algorithm.clip_low",
    "algorithm.dual_clip",
    "algorithm.drift_coef",
    "algorithm.clip_filter_weight",
    "algorithm.gamma",
    "algorithm.gae_lambda",
    "algorithm.value_clip",
    "algorithm.value_huber",
    "algorithm.freezing_actor_steps",
    "algorithm.ema_beta",
    "algorithm.reward_clip",
    "algorithm.overlong_share",
    "algorithm.overlong_penalty",
    "algorithm.learnt_from",
    "algorithm.max_staleness",
    "algorithm.replay_limit",
    "algorithm.refill_rounds",
    "algorithm.clip_high",
    "algorithm.ptx_coef",
    "algorithm.kl_coef",
    "algorithm.kl_target",
    "checkpoint.every",
    "checkpoint.keep_mib",
    "logging.peak_tflops",
    "reward.remote_retries",
    "trainer.eval_every",
    "trainer.seed",
    "trainer.eval_temperature",
    "trainer.max_attention_per_micro_batch",
    "trainer.trajectories",
    "trainer.attention_weight",
    "faults.engine_restarts",
    "faults.max_restarts",
    "faults.watchdog_seconds",
)


def value_of(config: RunConfig, name: str) -> Any:
    """The value of a dotted option."""
    return reduce(getattr, name.split("."), config)


def numbers(given: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Dotted name and value of every number of a config, those in lists and dicts included."""
    named: Iterable[tuple[Any, Any]]
    if is_dataclass(given):
        named = [(field.name, getattr(given, field.name)) for field in fields(given)]
    elif isinstance(given, Mapping):
        named = given.items()
    elif isinstance(given, list | tuple):
        named = enumerate(given)
    else:
        if isinstance(given, int | float) and not isinstance(given, bool):
            yield name, given
        return
    for key, value in named:
        yield from numbers(value, f"{name}.{key}" if name else str(key))


def not_finite(config: RunConfig) -> list[str]:
    """Numbers that are infinite or NaN: no option means anything by them, and a loss that sees one learns nothing.

    The weights of data.sources are looked at with their files (validate_data.py).
    """
    found = [(name, value) for name, value in numbers(config) if not math.isfinite(value)]
    return [f"{name}={value} must be a finite number." for name, value in found if not name.startswith("data.sources.")]


def too_large(config: RunConfig) -> list[str]:
    """Whole numbers that no count, size or seed of torch, NumPy and vLLM holds."""
    return [
        f"{name}={value} must be below 2^31."
        for name, value in numbers(config)
        if isinstance(value, int) and abs(value) >= LARGEST
    ]


def choices(config: RunConfig) -> list[str]:
    """Names that there are not."""
    return [
        f"{name}={value} is unknown. Choose one of: {', '.join(allowed)}."
        for name, allowed in CHOICES.items()
        if (value := value_of(config, name)) not in allowed
    ]


def ranges(config: RunConfig) -> list[str]:
    """Numbers outside their range, the critic's own included."""
    bounds = (
        (AT_LEAST_ONE, "at least 1", lambda x: x >= 1),
        (NOT_NEGATIVE, "at least 0", lambda x: x >= 0),
        (POSITIVE, "positive", lambda x: x > 0),
        (BELOW_ONE, "below 1", lambda x: x < 1),
    )
    found = not_finite(config) + too_large(config)
    for names, bound, holds in bounds:
        for name in (*names, *_the_critics(config, names)):
            value = value_of(config, name)
            if math.isfinite(value) and not holds(value):
                found.append(f"{name}={value} must be {bound}.")
    return found


def _the_critics(config: RunConfig, names: Iterable[str]) -> list[str]:
    """Those options of the critic that differ from the policy's."""
    own = [name for name in names if name.startswith(AS_THE_POLICY)]
    return [f"critic.{name}" for name in own if value_of(config, f"critic.{name}") != value_of(config, name)]
