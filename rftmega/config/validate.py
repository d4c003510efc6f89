"""Everything about a config that can be wrong without looking at a model: names, ranges, files, the process layout."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any

from rftmega.config.schema import (
    AlgorithmConfig,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RunConfig,
    TrainerConfig,
)
from rftmega.config.sources import LONGEST_CYCLE, shares, split_source

AS_THE_POLICY = ("parallel.", "optimizer.")  # sections that the critic has, too, and takes from there what it is not given
LENGTHS = ("rollout.max_prompt_tokens", "rollout.max_response_tokens")
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
    "algorithm.weighting": ("token_mean", "sequence_mean", "sequence_sum"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
}
REWARD_OPTIONS = {  # option -> the parts that read it
    "format_pattern": ("format",),
    "math_seconds": ("math",),
    "code_seconds": ("code",),
    "code_memory_mib": ("code",),
    "workers": ("math", "code"),
    "remote_url": ("remote",),
    "remote_timeout": ("remote",),
    "remote_retries": ("remote",),
    "remote_batch": ("remote",),
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
    "algorithm.kl_horizon",
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
    "algorithm.high_entropy_share",
    "optimizer.epsilon",
    "reward.math_seconds",
    "reward.code_seconds",
    "reward.remote_timeout",
    "rollout.cpu_cache_gib",
    "rollout.memory_fraction",
    "rollout.temperature",
)
BELOW_ONE = ("algorithm.ema_beta", "model.dropout", "optimizer.beta1", "optimizer.beta2", "rollout.memory_fraction")
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
    "algorithm.gae_lambda",
    "algorithm.value_clip",
    "algorithm.value_huber",
    "algorithm.freezing_actor_steps",
    "algorithm.ema_beta",
    "algorithm.reward_clip",
    "algorithm.overlong_share",
    "algorithm.overlong_penalty",
    "algorithm.learnt_from",
    "algorithm.refill_rounds",
    "algorithm.clip_high",
    "algorithm.kl_coef",
    "algorithm.kl_target",
    "reward.remote_retries",
    "trainer.eval_every",
    "trainer.eval_temperature",
    "trainer.max_attention_per_micro_batch",
    "trainer.trajectories",
    "trainer.attention_weight",
)
READ_FROM = {  # which of data's keys are read, by algorithm.task
    "rl": ("label_key", "kind_key"),
    "sft": ("response_key",),
    "reward_model": ("chosen_key", "rejected_key"),
}
OF_ROLLOUTS = ("offload", "trajectories", "eval_samples", "eval_temperature", "eval_pass_at", "eval_accuracy", "trajectories_mib")
READ_OF_GIVEN = {  # options of algorithm, rollout and reward that a task without rollouts reads
    "sft": (*(f"algorithm.{name}" for name in ("task", "recipe", "mini_batches", "weighting", "ema_beta")), *LENGTHS),
    "reward_model": (*(f"algorithm.{name}" for name in ("task", "recipe", "mini_batches")), *LENGTHS),
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
        numbers = _layout(config.parallel, world_size) + _overlap(config.optimizer) + _rows(config) + _held_out(config)
        if config.algorithm.task == "rl":
            numbers += _engine(config, world_size) + _algorithm(config.algorithm) + _reward(config) + _evaluation(config)
        elif not choices:
            numbers += _given(config)
        numbers += _critic(config, world_size)
    return choices + numbers + _data(config) + _files(config)


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
        for name in (*names, *_the_critics(config, names))
        if not holds(value_of(config, name))
    ]


def _the_critics(config: RunConfig, names: Iterable[str]) -> list[str]:
    """Those options of the critic that differ from the policy's."""
    own = [name for name in names if name.startswith(AS_THE_POLICY)]
    return [f"critic.{name}" for name in own if value_of(config, f"critic.{name}") != value_of(config, name)]


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


def _critic(config: RunConfig, world_size: int) -> list[str]:
    critic = config.critic
    if config.algorithm.advantage == "gae":
        found = [*_layout(critic.parallel, world_size), *_overlap(critic.optimizer)]
        already = [*_layout(config.parallel, world_size), *_overlap(config.optimizer)]
        found = [f"For the critic: {reason}" for reason in found if reason not in already]
        if (frozen := config.algorithm.freezing_actor_steps) >= config.trainer.steps:
            found.append(
                f"algorithm.freezing_actor_steps={frozen} leaves the policy nothing of the {config.trainer.steps} steps "
                "(trainer.steps). Lower it."
            )
        return found
    unread = [
        f"critic.{section}.{f.name}"
        for section in ("parallel", "optimizer")
        for f in fields(getattr(critic, section))
        if getattr(getattr(critic, section), f.name) not in (f.default, getattr(getattr(config, section), f.name))
    ]
    return [
        f"{name}={value_of(config, name)} needs algorithm.advantage=gae, not {config.algorithm.advantage}: there is no critic."
        for name in (*unread, *(["critic.path"] if critic.path else []))
    ]


def _algorithm(algorithm: AlgorithmConfig) -> list[str]:
    found = []
    per_token = ("reinforce", "gae")
    needs = (  # an option and the choices that read it
        ("dual_clip", "surrogate", ("ppo",)),
        ("drift_coef", "surrogate", ("cpgd",)),
        ("clip_low", "surrogate", ("ppo", "gspo", "cispo", "cpgd")),
        ("clip_high", "surrogate", ("ppo", "gspo", "cispo", "cpgd")),
        ("gamma", "advantage", per_token),
        ("gae_lambda", "advantage", ("gae",)),
        ("value_clip", "advantage", ("gae",)),
        ("value_huber", "advantage", ("gae",)),
        ("freezing_actor_steps", "advantage", ("gae",)),
        ("scale_by_std", "advantage", ("group",)),
        ("kl_in", "advantage", per_token),
    )
    for option, other, values in needs:
        if getattr(algorithm, option) != getattr(AlgorithmConfig, option) and getattr(algorithm, other) not in values:
            found.append(
                f"algorithm.{option}={getattr(algorithm, option)} needs algorithm.{other}={' or '.join(values)}, not "
                f"{getattr(algorithm, other)}: nothing else reads it."
            )
    switched = (
        ("kl_target", "kl_coef"),
        ("kl_horizon", "kl_target"),
        ("overlong_penalty", "overlong_share"),
        ("refill_by", "refill_rounds"),
    )
    for option, switch in switched:
        if getattr(algorithm, option) != getattr(AlgorithmConfig, option) and not getattr(algorithm, switch):
            found.append(
                f"algorithm.{option}={getattr(algorithm, option)} needs algorithm.{switch} above 0: nothing else reads it."
            )
    if 0 < algorithm.dual_clip <= 1:
        found.append(f"algorithm.dual_clip={algorithm.dual_clip} must be above 1, or 0 for none.")
    if algorithm.correction_cap < 1:
        found.append(f"algorithm.correction_cap={algorithm.correction_cap} must be at least 1.")
    elif algorithm.correction == "none" and algorithm.correction_cap != AlgorithmConfig.correction_cap:
        found.append(f"algorithm.correction_cap={algorithm.correction_cap} needs algorithm.correction: nothing else reads it.")
    for option in ("gae_lambda", "overlong_share", "high_entropy_share"):
        if getattr(algorithm, option) > 1:
            found.append(f"algorithm.{option}={getattr(algorithm, option)} must be at most 1.")
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


def _given(config: RunConfig) -> list[str]:
    """What a task without rollouts does not read."""
    task = config.algorithm.task
    read = READ_OF_GIVEN[task]
    settings = [
        (f"{section}.{f.name}", getattr(getattr(config, section), f.name), getattr(type(getattr(config, section))(), f.name))
        for section in ("algorithm", "rollout", "reward")
        for f in fields(getattr(config, section))
    ]
    trainer = [
        (f"trainer.{name}", getattr(config.trainer, name), getattr(TrainerConfig(), name))
        for name in OF_ROLLOUTS
        if config.data.held_out or not name.startswith("eval_")  # which `_held_out` has refused already
    ]
    whole = [("strategy", config.strategy, RunConfig.strategy)]
    return [
        f"{name}={value}: with algorithm.task={task} nothing is generated or rewarded, so nothing reads it. Leave it out."
        for name, value, default in whole + settings + trainer
        if name not in read and value != default
    ]


def _rows(config: RunConfig) -> list[str]:
    found = []
    task = config.algorithm.task
    answers = (config.algorithm.learnt_from or config.rollout.samples_per_prompt) if task == "rl" else 1
    rows = config.trainer.prompts_per_step * answers
    if config.algorithm.learnt_from > config.rollout.samples_per_prompt:
        found.append(
            f"algorithm.learnt_from={config.algorithm.learnt_from} is more than the answers a prompt gets "
            f"(rollout.samples_per_prompt={config.rollout.samples_per_prompt}). Lower it, or set it to 0."
        )
    if config.algorithm.mini_batches > rows:
        found.append(
            f"algorithm.mini_batches={config.algorithm.mini_batches} is more than the rows of a step (trainer.prompts_per_step"
            f" x answers = {config.trainer.prompts_per_step} x {answers} = {rows})."
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    together, what = (1, "one row") if task != "reward_model" else (2, "a pair of rows")
    longest += int(task == "reward_model" or bool(config.reward.model))  # a score has a place of its own
    attention_cap = config.trainer.max_attention_per_micro_batch
    if attention_cap and attention_cap < together * longest**2:
        found.append(
            f"trainer.max_attention_per_micro_batch={attention_cap} can't hold {what} of {longest} tokens, "
            f"{together * longest**2} squared. Raise it, or set it to 0."
        )
    if config.trainer.max_tokens_per_micro_batch < together * longest:
        found.append(
            f"trainer.max_tokens_per_micro_batch={config.trainer.max_tokens_per_micro_batch} can't hold {what} of "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}. Raise it, or shorten the rows."
        )
    if not config.trainer.trajectories and config.trainer.trajectories_mib != TrainerConfig.trajectories_mib:
        found.append(
            f"trainer.trajectories_mib={config.trainer.trajectories_mib} needs trainer.trajectories above 0: none are written."
        )
    found += _schedule("optimizer", config.optimizer, config, frozen=config.algorithm.freezing_actor_steps)
    if config.algorithm.advantage == "gae" and config.critic.optimizer != config.optimizer:
        found += _schedule("critic.optimizer", config.critic.optimizer, config, frozen=0)
    if config.algorithm.ema_beta and not config.trainer.export:
        found.append("algorithm.ema_beta needs trainer.export: the average is only written down.")
    return found


def _schedule(section: str, optimizer: OptimizerConfig, config: RunConfig, *, frozen: int) -> list[str]:
    found = []
    steps = (config.trainer.steps - frozen) * config.algorithm.mini_batches
    if optimizer.warmup_steps >= steps > 0:
        found.append(
            f"{section}.warmup_steps={optimizer.warmup_steps} leaves nothing of the {steps} optimizer steps "
            "(trainer.steps, less algorithm.freezing_actor_steps for the policy, x algorithm.mini_batches)."
        )
    if optimizer.min_learning_rate > optimizer.learning_rate:
        found.append(f"{section}.min_learning_rate is above {section}.learning_rate.")
    return found


def _held_out(config: RunConfig) -> list[str]:
    trainer, found = config.trainer, []
    if not config.data.held_out:
        options = [option.name for option in fields(trainer) if option.name.startswith("eval_")]
        return [
            f"trainer.{option}={value} needs data.eval or data.evals: nothing else reads it."
            for option in options
            if (value := getattr(trainer, option)) != getattr(TrainerConfig(), option)
        ]
    if config.data.eval and config.data.evals:
        found.append("data.eval and data.evals are both given. Give the one file a name in data.evals, too.")
    for name in config.data.evals:
        if not re.fullmatch(r"[\w-]+", name):
            found.append(f"data.evals: {name!r} becomes a part of metrics' names. Use letters, digits, _ and - only.")
    return found


def _evaluation(config: RunConfig) -> list[str]:
    trainer, found = config.trainer, []
    if not config.data.held_out:
        return []
    if trainer.eval_samples > 1 and not trainer.eval_temperature:
        found.append(
            f"trainer.eval_samples={trainer.eval_samples} at trainer.eval_temperature=0 is one answer as often. Raise the "
            "temperature, or take one sample."
        )
    for k in trainer.eval_pass_at:
        if not 1 <= k <= trainer.eval_samples:
            found.append(
                f"trainer.eval_pass_at={k} must be from 1 to trainer.eval_samples={trainer.eval_samples}: pass@k needs k answers."
            )
    parts = config.reward.parts()
    if trainer.eval_accuracy not in parts:
        found.append(
            f"trainer.eval_accuracy={trainer.eval_accuracy} is no part of the reward. Choose one of: {', '.join(parts)}."
        )
    elif trainer.eval_accuracy not in config.reward.in_every_answer():
        found.append(
            f"trainer.eval_accuracy={trainer.eval_accuracy} needs a weight of that part, for every kind of prompt: it is not "
            "computed otherwise."
        )
    return found


def _reward(config: RunConfig) -> list[str]:
    reward, parts = config.reward, config.reward.parts()
    flat = {f"reward.{name}": getattr(reward, name) for name in (*parts, "model")}
    by_kind = {f"reward.recipe.{kind}.{name}": w for kind, given in reward.recipe.items() for name, w in given.items()}
    found = [
        f"{name}={weight} must be a finite number." for name, weight in (flat | by_kind).items() if not math.isfinite(weight)
    ]
    for kind, given in reward.recipe.items():
        if unknown := [name for name in given if name not in parts]:
            found.append(f"reward.recipe.{kind}: {', '.join(unknown)} is unknown. Choose among: {', '.join(parts)}.")
        elif not any(given.values()):
            found.append(f"reward.recipe.{kind} gives no part a weight, so nothing could be learnt from it.")
    if not reward.recipe and not reward.model and not any(flat.values()):
        found.append("No reward has a weight, so nothing could be learnt. Set one of: " + ", ".join(flat) + ".")
    if reward.recipe:
        for name in parts:
            if (weight := getattr(reward, name)) != getattr(RewardConfig, name):
                found.append(f"reward.{name}={weight} beside reward.recipe: nothing reads it. Move it there.")
    used = reward.used()
    for part, option, what in (("format", "format_pattern", "regular expression"), ("remote", "remote_url", "URL")):
        if part in used and not getattr(reward, option):
            found.append(f"reward.{part} has a weight, but reward.{option} is empty. Give a {what}.")
    for option, readers in REWARD_OPTIONS.items():
        if getattr(reward, option) != getattr(RewardConfig, option) and not used.intersection(readers):
            needed = " or ".join(f"reward.{name}" for name in readers)
            found.append(f"reward.{option}={getattr(reward, option)} needs a weight of {needed}: nothing else reads it.")
    if "remote" in used and reward.remote_url and not reward.remote_url.startswith(("http://", "https://")):
        found.append(f"reward.remote_url={reward.remote_url} must begin with http:// or https://.")
    if config.data.kind_key != DataConfig.kind_key and not reward.recipe and "remote" not in used:
        found.append(f"data.kind_key={config.data.kind_key} needs reward.recipe or reward.remote: nothing else reads kinds.")
    return found + _beside_labels(config)


def _beside_labels(config: RunConfig) -> list[str]:
    """Rewards that compare no answer with a label, and what looks at rewards once all are there."""
    reward, found = config.reward, []
    if bool(reward.model) != bool(reward.model_path):
        found.append(
            f"reward.model={reward.model} and reward.model_path={reward.model_path!r} need each other: a weight, and the "
            "folder of a reward model."
        )
    if reward.model and reward.majority:
        found.append("reward.majority and reward.model are two ways to do without labels. Take one of them.")
    if reward.majority and config.rollout.samples_per_prompt < 3:
        found.append(
            f"reward.majority needs more answers a prompt than rollout.samples_per_prompt={config.rollout.samples_per_prompt}: "
            "two can't outvote each other."
        )
    needing = sorted({"exact_match", "math", "multiple_choice", "code"} & reward.used())
    if not config.data.label_key and needing and not reward.majority:
        found.append(
            f"data.label_key is empty, but {', '.join(f'reward.{name}' for name in needing)} compares answers with labels. Set "
            "its weight to 0 (reward.majority, reward.model, format and remote need none)."
        )
    if not config.data.label_key and config.data.held_out:
        found.append(
            "data.label_key is empty, but evaluation compares answers with labels. Name the key, or leave data.eval out."
        )
    if config.algorithm.refill_rounds and (config.algorithm.learnt_from or config.rollout.samples_per_prompt) < 2:
        found.append(
            f"algorithm.refill_rounds={config.algorithm.refill_rounds} compares a prompt's answers, and there is one of each. "
            "Raise rollout.samples_per_prompt (and algorithm.learnt_from), or set it to 0."
        )
    if reward.model and config.algorithm.refill_rounds:
        found.append(
            f"algorithm.refill_rounds={config.algorithm.refill_rounds} with reward.model: the engine gives its memory to the "
            "reward model and could not go on. Set it to 0."
        )
    everywhere = ["majority"] if reward.majority else sorted(reward.in_every_answer())
    if config.algorithm.refill_by and config.algorithm.refill_by not in everywhere:
        found.append(
            f"algorithm.refill_by={config.algorithm.refill_by} is not in every answer's reward. Choose one of: "
            f"{', '.join(everywhere)}."
        )
    return found


def _data(config: RunConfig) -> list[str]:
    data, task, found = config.data, config.algorithm.task, []
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
    for option in sorted({option for read in READ_FROM.values() for option in read} - set(READ_FROM.get(task, ()))):
        if (value := getattr(data, option)) != getattr(DataConfig, option):
            found.append(f"data.{option}={value}: with algorithm.task={task} nothing reads it. Leave it out.")
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
    if config.critic.path and config.algorithm.advantage == "gae" and not (Path(config.critic.path) / "config.json").is_file():
        found.append(f"critic.path={config.critic.path} holds no config.json. Give a Hugging Face folder.")
    data = config.data
    named = [("data.train=", data.train), *(("data.sources: ", source) for source in data.sources), ("data.eval=", data.eval)]
    named += [(f"data.evals.{name}=", source or " ") for name, source in data.evals.items()]
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
