"""Everything about a config that can be wrong without looking at a model: names, ranges, files, the process layout."""

import json
import math
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Any

from rftmega.config.schema import AlgorithmConfig, DataConfig, OptimizerConfig, ParallelConfig, RunConfig
from rftmega.config.sources import LONGEST_CYCLE, shares, split_source

CHOICES = {
    "strategy": ("colocated", "separate"),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "parallel.recompute": ("none", "selective", "full"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
    "rollout.engine": ("vllm", "transformers", "scripted"),
    "data.too_long": ("error", "drop"),
    "algorithm.advantage": ("group", "leave_one_out", "reinforce", "reinforce_baseline"),
    "algorithm.surrogate": ("ppo", "gspo", "cispo", "cpgd", "reinforce"),
    "algorithm.correction": ("none", "token", "sequence", "mask"),
    "algorithm.weighting": ("token_mean", "sequence_mean", "sequence_sum"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
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
    "trainer.steps",
    "trainer.prompts_per_step",
    "trainer.push_bucket_mib",
)
POSITIVE = (
    "algorithm.high_entropy_share",
    "optimizer.epsilon",
    "rollout.cpu_cache_gib",
    "rollout.memory_fraction",
    "rollout.temperature",
)
BELOW_ONE = ("model.dropout", "optimizer.beta1", "optimizer.beta2", "rollout.memory_fraction")
NOT_NEGATIVE = (
    "model.dropout",
    "parallel.first_stage_layers",
    "parallel.last_stage_layers",
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
    "algorithm.gamma",
    "algorithm.clip_high",
    "algorithm.kl_coef",
    "trainer.eval_every",
    "trainer.max_attention_per_micro_batch",
    "trainer.attention_weight",
)
READ_FROM = {  # which of data's keys are read, by what a run learns from
    "prompts": ("label_key",),
    "supervised": ("response_key",),
    "preferences": ("chosen_key", "rejected_key"),
}


def value_of(config: RunConfig, name: str) -> Any:
    """The value of a dotted option."""
    return reduce(getattr, name.split("."), config)


def violations(config: RunConfig, world_size: int) -> list[str]:
    """All reasons why `config` can't run on `world_size` processes, each with what to change; empty when there are none."""
    choices = []
    for name, allowed in CHOICES.items():
        if (value := value_of(config, name)) not in allowed:
            choices.append(f"{name}={value} is unknown. Choose one of: {', '.join(allowed)}.")
    numbers = _ranges(config)
    if world_size < 1:
        numbers.append(f"--processes {world_size} must be at least 1.")
    if not numbers:  # the arithmetic below needs sizes that make sense
        numbers = _layout(config.parallel, world_size) + _overlap(config.optimizer) + _engine(config, world_size) + _batch(config)
        numbers += _algorithm(config.algorithm)
    return choices + numbers + _data(config.data) + _files(config)


def _ranges(config: RunConfig) -> list[str]:
    bounds = (
        (AT_LEAST_ONE, "at least 1", lambda x: x >= 1),
        (NOT_NEGATIVE, "at least 0", lambda x: x >= 0),
        (POSITIVE, "positive", lambda x: x > 0),
        (BELOW_ONE, "below 1", lambda x: x < 1),
    )
    return [
        f"{name}={value_of(config, name)} must be {bound}."
        for names, bound, holds in bounds
        for name in names
        if not holds(value_of(config, name))
    ]


def _layout(parallel: ParallelConfig, world_size: int) -> list[str]:
    found = []
    experts = [("expert_tensor", "expert", "pipeline")] if parallel.expert * parallel.expert_tensor > 1 else []
    for options in [("tensor", "context", "pipeline"), *experts]:
        sizes = {option: size for option in options if (size := getattr(parallel, option)) > 1}
        together = math.prod(sizes.values())
        if world_size % together:
            nearest = max(round(world_size / together), 1) * together
            found.append(
                f"{' x '.join(f'parallel.{option}' for option in sizes)} = {_product(sizes.values())} does not "
                f"divide the {world_size} launched processes. Launch {nearest} (--processes or torchrun), or lower one of them."
            )
    if parallel.sequence and parallel.tensor == 1:
        found.append("parallel.sequence needs parallel.tensor > 1: it splits the sequence between the tensor-parallel processes.")
    if parallel.pipeline == 1:
        for option, off in (("virtual_pipeline", 1), ("first_stage_layers", 0), ("last_stage_layers", 0)):
            if (value := getattr(parallel, option)) != off:
                found.append(f"parallel.{option}={value} needs parallel.pipeline > 1: there is one stage. Set it to {off}.")
    return found


def _product(factors: Iterable[int]) -> str:
    """As "2 x 3 = 6", or "6" where there is nothing to multiply."""
    factors = list(factors)
    return " x ".join(map(str, factors)) + (f" = {math.prod(factors)}" if len(factors) > 1 else "")


def _overlap(optimizer: OptimizerConfig) -> list[str]:
    missing = [name for name in ("distributed", "overlap_grad_reduce") if not getattr(optimizer, name)]
    if optimizer.overlap_param_gather and missing:
        needed = " and ".join(f"optimizer.{name}=true" for name in missing)
        return [f"optimizer.overlap_param_gather=true also needs {needed}: only sharded parameters are gathered."]
    return []


def _algorithm(algorithm: AlgorithmConfig) -> list[str]:
    found = []
    needs = (  # an option, where it is set, what it needs, what it is set to where nothing reads it
        ("dual_clip", "surrogate", "ppo", 0.0),
        ("drift_coef", "surrogate", "cpgd", 0.0),
        ("gamma", "advantage", "reinforce", 1.0),
        ("scale_by_std", "advantage", "group", True),
        ("kl_in", "advantage", "reinforce", "loss"),
    )
    for option, other, value, off in needs:
        if getattr(algorithm, option) != off and getattr(algorithm, other) != value:
            found.append(
                f"algorithm.{option}={getattr(algorithm, option)} needs algorithm.{other}={value}, not "
                f"{getattr(algorithm, other)}: nothing else reads it."
            )
    if 0 < algorithm.dual_clip <= 1:
        found.append(f"algorithm.dual_clip={algorithm.dual_clip} must be above 1, or 0 for none.")
    if algorithm.correction_cap < 1:
        found.append(f"algorithm.correction_cap={algorithm.correction_cap} must be at least 1.")
    elif algorithm.correction == "none" and algorithm.correction_cap != AlgorithmConfig.correction_cap:
        found.append(f"algorithm.correction_cap={algorithm.correction_cap} needs algorithm.correction: nothing else reads it.")
    if algorithm.high_entropy_share > 1:
        found.append(f"algorithm.high_entropy_share={algorithm.high_entropy_share} must be at most 1.")
    if algorithm.kl_estimator == "k1" and algorithm.kl_in == "loss":
        found.append("algorithm.kl_estimator=k1 needs algorithm.kl_in=reward: as a loss its gradient is zero on average.")
    if algorithm.surrogate in ("ppo", "gspo", "cpgd") and algorithm.clip_low >= 1:
        found.append(f"algorithm.clip_low={algorithm.clip_low} must be below 1 for algorithm.surrogate={algorithm.surrogate}.")
    return found


def _engine(config: RunConfig, world_size: int) -> list[str]:
    found = []
    if config.strategy == "separate":
        if config.rollout.engine != "vllm":
            found.append(f"strategy=separate starts vLLM servers, not rollout.engine={config.rollout.engine}. Set it to vllm.")
        return found
    if config.rollout.servers > 1:
        found.append(f"rollout.servers={config.rollout.servers} needs strategy=separate: colocated engines are no servers.")
    if world_size % config.rollout.tensor:
        found.append(
            f"rollout.tensor={config.rollout.tensor} does not divide the {world_size} launched processes, so the last engine "
            "would be incomplete. Lower it."
        )
    if config.rollout.engine != "vllm" and config.rollout.tensor > 1:
        found.append(f"rollout.tensor={config.rollout.tensor}: only the vllm engine is split over processes. Set it to 1.")
    return found


def _batch(config: RunConfig) -> list[str]:
    found = []
    rows = config.trainer.prompts_per_step * config.rollout.samples_per_prompt
    if config.algorithm.mini_batches > rows:
        found.append(
            f"algorithm.mini_batches={config.algorithm.mini_batches} is more than the rows of a rollout (trainer.prompts_per_step"
            f" x rollout.samples_per_prompt = {config.trainer.prompts_per_step} x {config.rollout.samples_per_prompt} = {rows})."
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    attention_cap = config.trainer.max_attention_per_micro_batch
    if attention_cap and attention_cap < longest**2:
        found.append(
            f"trainer.max_attention_per_micro_batch={attention_cap} can't hold one row of {longest} tokens, {longest**2} "
            "squared. Raise it, or set it to 0."
        )
    if config.trainer.max_tokens_per_micro_batch < longest:
        found.append(
            f"trainer.max_tokens_per_micro_batch={config.trainer.max_tokens_per_micro_batch} can't hold one row of "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}. Raise it, or shorten the rows."
        )
    if config.reward.format and not config.reward.format_pattern:
        found.append("reward.format has a weight, but reward.format_pattern is empty. Give a regular expression.")
    optimizer_steps = config.trainer.steps * config.algorithm.mini_batches
    if config.optimizer.warmup_steps >= optimizer_steps:
        found.append(
            f"optimizer.warmup_steps={config.optimizer.warmup_steps} leaves nothing of the {optimizer_steps} optimizer steps "
            "(trainer.steps x algorithm.mini_batches)."
        )
    if config.optimizer.min_learning_rate > config.optimizer.learning_rate:
        found.append("optimizer.min_learning_rate is above optimizer.learning_rate.")
    return found


def _data(data: DataConfig, *, learns_from: str = "prompts") -> list[str]:
    """`learns_from`, one of READ_FROM: the kind of data that a run reads."""
    found = []
    if data.sources and data.train:
        found.append(f"data.train={data.train} and data.sources are both given. Leave one out, or name it among the sources.")
    if not (data.sources or data.train):
        found.append("data.train must be given, or data.sources.")
    odd = {source: weight for source, weight in data.sources.items() if not 0 < weight < math.inf}
    found += [f"data.sources: the weight {weight} of {source} must be positive and finite." for source, weight in odd.items()]
    if data.sources and not odd and (cycle := sum(shares(list(data.sources.values())))) > LONGEST_CYCLE:
        found.append(
            f"data.sources: the weights are exact only after {cycle} examples, more than {LONGEST_CYCLE}. Round them, as to 0.25."
        )
    for option in sorted({option for read in READ_FROM.values() for option in read} - set(READ_FROM[learns_from])):
        if (value := getattr(data, option)) != getattr(DataConfig, option):
            found.append(f"data.{option}={value}: nothing reads it, since this run learns from {learns_from}. Leave it out.")
    return found


def _files(config: RunConfig) -> list[str]:
    found = []
    folder = Path(config.model.path)
    if not folder.is_dir():
        found.append(f"model.path={folder} is not a folder. Give a Hugging Face folder.")
    else:
        if not (folder / "config.json").is_file():
            found.append(f"model.path={folder} holds no config.json.")
        found += _weights(folder)
    data = config.data
    named = [("data.train=", data.train), *(("data.sources: ", source) for source in data.sources), ("data.eval=", data.eval)]
    found += [
        f"{name}{source} is not a file or folder." for name, source in named if source and not split_source(source)[0].exists()
    ]
    return found


def _weights(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [f"model.path={folder}: {index.name} names {n}, which is missing." for n in named if not (folder / n).is_file()]
    if not list(folder.glob("*.safetensors")):
        return [f"model.path={folder} holds no *.safetensors weights. Convert or download them first."]
    return []
