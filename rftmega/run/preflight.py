"""Checks a run before a process group or a model exists, and reports all problems in one error."""

import os
from collections.abc import Sequence
from pathlib import Path

from rftmega.backends.decoder.adapted_layers import adapted_of
from rftmega.backends.decoder.describe import (
    beyond_its_positions,
    describe_any,
    read_config,
    tower_of,
)
from rftmega.backends.decoder.meta_decoder import describe as described
from rftmega.backends.decoder.tensor_plan import styles_of
from rftmega.config import SERVED_VOCABULARY, LoRA, ParallelConfig, RunConfig
from rftmega.config.capabilities import backend_of, engine_of
from rftmega.config.options.speculative import DraftModel
from rftmega.config.options.teachers import Teacher, names_of
from rftmega.config.teacher_config import config_of
from rftmega.config.validation import violations
from rftmega.converters import shard_shape, table
from rftmega.converters.adapters import adapted_layers
from rftmega.core.errors import CheckpointError, ConfigError
from rftmega.core.json_files import read_json_object
from rftmega.core.shards import LINEAR, OF_VOCABULARY
from rftmega.data.same_tokenizer import different_tokens
from rftmega.model_providers.description import (
    ModelDescription,
    describe,
    heads_violations,
    layout_violations,
)
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.model_providers.optional_cuda_packages import installed, uses_transformer_engine
from rftmega.model_providers.placement import holdings
from rftmega.model_providers.transformers_decoders import on_meta, unknown_to_transformers
from rftmega.models.hf.hf_folder import HFFolder
from rftmega.models.hf.peft_folder import CONFIG as PEFT_CONFIG
from rftmega.models.hf.peft_folder import PEFTFolder
from rftmega.models.hf.quantised_folder import is_quantised
from rftmega.models.known_fields import ignore
from rftmega.rollout.engines.vllm_models import forbids_drafts
from rftmega.rollout.servers.vllm import auth
from rftmega.run import run_end
from rftmega.run.planning.memory import rows_of
from rftmega.run.vllm_on_a_cpu import refusals
from rftmega.runtime import device
from rftmega.runtime.device import hardware
from rftmega.runtime.parallel.layout import layout_name, place_of, replicas
from rftmega.weights.receivers.fp8 import BLOCK

# first Transformer Engine version that supports gradient checkpointing with FP8
FP8_SINCE = (2, 6)
HEAD = "score.weight"  # of a value model


def preflight(
    config: RunConfig, world_size: int, *, local: bool = False, on: device.Device | None = None
) -> None:
    """Raises a ConfigError that lists every reason why this run can't work on `world_size`
    processes.

    `local`: all processes are on this host; `on`: the type of device that they run on, None for
    this process's own.
    """
    here, on = on is None, on or device.current()
    ignore(config.model.ignore_config_fields)
    found = violations(config, world_size)
    if here:
        found += hardware.refusals(hardware.found())
    try:
        model = _described(config, config.model.path)
    except CheckpointError as error:
        if not any(config.model.path in reason for reason in found):
            found.append(str(error))
    else:
        found += _layout_violations(config, config.model.path, model, config.parallel)
        found += _of_backend(config, model, on if here else None, named="model.path", known=found)
        found += _value_models(config, model) + _adapters(config, model)
        if config.algorithm.task == "rl":
            found += _teachers(config, model, on if here else None)
            found += _engine(config, model, on) + _router_replay(config, model, on)
            found += _fp8_engine(config, model, on) + _drafts(config, model)
        longest = config.rollout.max_row_tokens
        if longest > model.max_positions:
            found.append(
                f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}, but the model knows "
                f"{model.max_positions} positions (max_position_embeddings). Shorten one of them."
            )
    devices = on.devices() if local else None
    servers = config.rollout.servers * config.rollout.tensor if config.strategy == "separate" else 0
    if devices is not None and world_size + servers > devices:
        beside = f" and {servers} of vLLM's" if servers else ""
        found.append(
            f"--processes {world_size}{beside} are more than the {devices} CUDA device(s) here; each needs its own."
        )
    if config.faults.max_restarts and not local:
        found.append(
            f"faults.max_restarts={config.faults.max_restarts} needs --processes: whoever starts the ranks starts them again "
            "(torchrun --max-restarts)."
        )
    found += run_end.refusals(config) + _quantised(config) + (_key(config) if here else [])
    if found:
        raise ConfigError.listing("This run can't start", list(dict.fromkeys(found)))


def _of_backend(
    config: RunConfig,
    model: ModelDescription,
    on: device.Device | None,
    *,
    named: str = "",
    known: Sequence[str] = (),
) -> list[str]:
    """Returns the reasons why the backend of `config` can't compute `config.model`, besides its
    layout. `on`: this process's type of device; None: the model is computed elsewhere. `named`: the
    option that gives the model. `known`: reasons so far; if one names the folder, nothing is built.
    """
    longest = config.rollout.max_row_tokens
    if backend_of(config).any_decoder:
        path, value = config.model.path, config.algorithm.task == "reward_model"
        found = beyond_its_positions(read_config(path), longest)
        if not any(path in reason for reason in (*known, *found)):
            lora = config.model.lora
            found += _unbuildable(path, value_model=value, lora=lora, named=named)
        return found
    found = []
    if on is not None and on.type == "cuda" and model.experts and not uses_transformer_engine():
        found.append(
            f"Experts on CUDA need Transformer Engine's grouped products; this run would be {installed().told}. "
            "Install it as docs/cluster.md says, or take a dense model."
        )
    if config.model.fp8 != "none" and on is not None:
        found += _fp8_matmuls(config, model, on)
    if (long := model.rope.long) and longest > long.original_positions:
        found.append(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}, but with rope_type=longrope, rows beyond "
            f"{long.original_positions} tokens are rotated otherwise, which is not supported. Shorten one of them."
        )
    return found


def _key(config: RunConfig) -> list[str]:
    """Returns a message if the key for remote servers is missing or invalid; only on rank 0, which
    connects to the servers.
    """
    elsewhere = config.rollout.addresses or config.rollout.server_list
    if config.strategy != "separate" or not elsewhere or os.environ.get("RANK", "0") != "0":
        return []
    try:
        auth.given_key()
    except ValueError as error:
        return [f"{error} Servers of rollout.addresses and rollout.server_list ask for it."]
    return []


def _described(config: RunConfig, path: str) -> ModelDescription:
    """Returns the description of a model, read from its config.json as the run's backend reads it.

    Raises CheckpointError if the backend does not support the model.
    """
    if backend_of(config).any_decoder:
        read = read_config(path)
        return describe_any(read, tower_of(path, read))
    return describe(read_hf_config(path), refused=lambda: "".join(_unbuildable(path)))


def _counted(config: RunConfig, path: str) -> ModelDescription:
    """Returns the description of `_described`, with the number of parameters for every backend."""
    if not backend_of(config).any_decoder:
        return _described(config, path)
    read = read_config(path)
    return described(on_meta(read, "eager"), tower_of(path, read))


def _router_replay(config: RunConfig, model: ModelDescription, on: device.Device) -> list[str]:
    chosen = config.rollout.router_replay
    if chosen == "none":
        return []
    given = f"rollout.router_replay={chosen}"
    if model.experts is None:
        return [f"{given}: this model has no experts. Set it to none."]
    if chosen == "engine" and config.strategy == "separate" and model.tower is not None:
        return [
            f"{given} with strategy=separate: servers tell nothing of prompts with images or sound. Set it to trainer, or "
            "strategy to colocated."
        ]
    if chosen == "engine" and config.strategy == "separate" and on.type != "cuda":
        return [
            f"{given} with strategy=separate: vLLM's servers tell of experts on CUDA alone. Set it to trainer, or strategy to "
            "colocated."
        ]
    return []


def _fp8_matmuls(config: RunConfig, model: ModelDescription, on: device.Device) -> list[str]:
    """Returns the reason why the trainer can't use FP8 matmuls on devices of type `on`; [] if it
    can.
    """
    said = f"model.fp8={config.model.fp8}"
    engine = installed().transformer_engine
    if engine is None or engine < FP8_SINCE:
        told = installed().told or "on a CPU, which has no such products"
        least = ".".join(map(str, FP8_SINCE))
        return [
            f"{said} needs Transformer Engine {least} or later on CUDA; this run would be {told}. Set it to none."
        ]
    if config.model.fp8 not in on.fp8_matmuls():
        can = " or ".join(on.fp8_matmuls()) or "none"
        return [
            f"{said}: this device does not multiply so. Set it to {can} (blockwise is Hopper's, mxfp8 Blackwell's)."
        ]
    if model.tower or model.latent or model.delta_net:
        return [
            f"{said}: models with latent or linear attention, or that see or hear, can't have it yet. Set it to none."
        ]
    odd = {size for size in (model.hidden, model.ffn // config.parallel.tensor) if size % 16}
    if odd:
        return [
            f"{said} needs matrices whose sides are multiples of 16; {config.model.path} has {min(odd)}. Set it to none."
        ]
    return []


def _fp8_engine(config: RunConfig, model: ModelDescription, on: device.Device) -> list[str]:
    """Returns the reasons why vLLM can't compute the model's linear layers in FP8 on devices of
    type `on`; [] if it can, or need not (rollout.quantization).
    """
    rollout = config.rollout
    by_vllm = engine_of(rollout).vllm_kernels and backend_of(config).names_linear
    if rollout.quantization == "none" or not by_vllm:
        return []
    given = f"rollout.quantization={rollout.quantization}"
    if not on.has_fp8_matmul():
        return [
            f"{given}: vLLM multiplies such numbers on CUDA, and on CPUs with AMX. Here rollout.engine=transformers computes "
            "with the same rounded weights, in float32."
        ]
    if model.latent or model.tower or model.delta_net:
        return [
            f"{given}: models with latent or linear attention, or that see or hear, can't have it. Set it to none."
        ]
    rules = [rule for rule in table(read_hf_config(config.model.path)) if rule.per_layer]
    names = [(rule, name) for rule in rules if rule.exported for name in rule.hf_names(0, 0)]
    layers = {
        name.split(".")[-2]
        for rule, name in names
        if rule.per_expert or name.endswith("_proj.weight")
    }
    unknown = layers - set(LINEAR)
    if unknown:
        return [
            f"{given}: {', '.join(sorted(unknown))} are no layers that it knows. Set it to none."
        ]
    experts = model.experts
    sizes = {
        "queries": model.heads * model.head_dim,
        "keys": model.groups * model.head_dim,
        "an MLP": 0 if experts and len(experts.layers) == model.layers else model.ffn,
        "an expert": experts.ffn if experts else 0,
        "the shared expert": experts.shared_ffn if experts else 0,
    }
    return [
        f"{given}: the {size} rows of {what} over rollout.tensor={rollout.tensor} processes are no multiple of {BLOCK}, the rows "
        "that share a scale. Lower rollout.tensor, or set it to none."
        for what, size in sizes.items()
        if size % (BLOCK * rollout.tensor)
    ]


def _layout_violations(
    config: RunConfig, path: str, model: ModelDescription, parallel: ParallelConfig
) -> list[str]:
    if backend_of(config).layouts:
        return layout_violations(model, parallel)
    if parallel.tensor == 1:
        return []
    try:
        styles_of(on_meta(read_config(path), "eager"), parallel.tensor)
    except CheckpointError as error:
        return [str(error)]
    return []


def _unbuildable(
    path: str, *, value_model: bool = False, lora: LoRA | None = None, named: str = ""
) -> list[str]:
    """Returns the reason why backend=fsdp can't build the model of the folder `path`, with the
    adapters `lora`; [] if it can, or if the folder has no weights. `named`: the option that names
    the folder, which a reason without the path begins with.
    """
    from rftmega.backends.fsdp.buildable import refuse_unbuildable  # its import takes seconds

    if not list(Path(path).glob("*.safetensors")):
        return []
    try:
        refuse_unbuildable(path, value_model=value_model, lora=lora)
    except ConfigError as error:
        return [str(error)]
    except (CheckpointError, ValueError, ImportError) as error:
        told = str(error)
        return [told if path in told or not named else f"{named}={path}: {told}"]
    return []


def _adapters(config: RunConfig, model: ModelDescription) -> list[str]:
    """Returns the reason why the model can't have the configured adapters, or can't start from the
    adapters in model.lora.path; [] if there is none.
    """
    lora = config.model.lora
    if not lora.rank or model.tower:
        return []
    try:
        targets = _adapted(config, config.model.path)
        if lora.push == "adapters" and model.experts:
            return [
                "model.lora.push=adapters: the model has experts, whose weights vLLM does not take in a push once it serves "
                "adapters. Leave it out: engines get merged weights then."
            ]
        of_vocabulary = sorted(targets & set(OF_VOCABULARY))
        kind = read_json_object(Path(config.model.path) / "config.json").get("model_type")
        if lora.push == "adapters" and of_vocabulary and kind not in SERVED_VOCABULARY:
            return [
                f"model.lora.push=adapters: vLLM leaves adapters on {', '.join(of_vocabulary)} out of models of {kind}; it "
                f"serves them in those of {', '.join(SERVED_VOCABULARY)}. Set model.lora.push=merged, "
                f"or leave them out of model.lora.targets."
            ]
        if lora.path and (Path(lora.path) / PEFT_CONFIG).is_file():
            PEFTFolder(lora.path, option="model.lora.path").check(lora, targets)
    except (ConfigError, CheckpointError) as error:
        return [str(error)]
    return []


def _adapted(config: RunConfig, path: str, *, value: bool = False) -> frozenset[str]:
    """Returns the names of the layers with adapters in the model folder `path`, without their path
    in the model, such as q_proj. `value`: the model has a value head.
    """
    lora = config.model.lora
    if backend_of(config).any_decoder:
        model = on_meta(read_config(path), "eager")
        return adapted_of(model, lora.targets, value=value).targets
    rules = table(read_hf_config(path), value_head=value)
    layers = adapted_layers(rules, rank=lora.rank, targets=lora.targets)
    return frozenset(target for layer in layers for target in layer.targets)


def _quantised(config: RunConfig) -> list[str]:
    """Returns the reason why the trained weights can't be exported quantized, if
    trainer.export_quantised is set; otherwise [].
    """
    if not config.trainer.export_quantised:
        return []
    if not is_quantised(read_json_object(Path(config.model.path) / "config.json")):
        return [
            f"trainer.export_quantised=true: model.path={config.model.path} has no quantised weights (no "
            "quantization_config in its config.json), which the trained ones could be written like. Leave it out."
        ]
    return []


def _engine(config: RunConfig, model: ModelDescription, on: device.Device) -> list[str]:
    found = heads_violations(model, config.rollout.tensor, "rollout.tensor")
    if engine_of(config.rollout).vllm_kernels and on.type == "cpu":
        found += refusals(config.model, model, on)
    by_transformers = engine_of(config.rollout).transformers_class
    kind = read_json_object(Path(config.model.path) / "config.json").get("model_type")
    if by_transformers and (unknown := unknown_to_transformers(kind)):
        found.append(f"rollout.engine=transformers: {unknown}. Set rollout.engine=vllm.")
    return found


def _value_models(config: RunConfig, policy: ModelDescription) -> list[str]:
    """Returns the problems of the critic and of the reward and cost models, if the run has them;
    `policy`: the policy, whose vocabulary they must have.
    """
    found = []
    if config.algorithm.advantage.needs_critic and (
        config.critic.path or config.critic.parallel != config.parallel
    ):
        path = config.critic.path or config.model.path
        reasons = _value_model(
            config, "critic", "critic.path", path, config.critic.parallel, policy
        )
        found += reasons or _adapters_of_critic(config, path)
    for name, chosen in config.reward.scoring_models().items():
        path, what = chosen.path, name.replace("_", " ")
        if not path:
            continue
        reasons = _value_model(config, what, chosen.option, path, config.parallel, policy)
        if not reasons and list(Path(path).glob("*.safetensors")) and HEAD not in HFFolder(path):
            reasons = [
                f"{chosen.option}={path} holds no {HEAD}: a policy says nothing about answers. Give a {what}."
            ]
        found += reasons
    return found


def _teachers(config: RunConfig, policy: ModelDescription, on: device.Device | None) -> list[str]:
    """Returns the problems of the teachers with their models; `on`: see `_of_backend`."""
    found = []
    teachers = config.algorithm.teachers
    for name, teacher in zip(names_of(teachers), teachers, strict=True):
        if not teacher.loads and (why := _too_many_tokens(teacher, policy.vocabulary)):
            found.append(f"algorithm.teachers: {name}: {why}")
        if not teacher.loads or not (Path(teacher.path) / "config.json").is_file():
            continue  # validation has said so
        option, path, longest = f"{name}: path", teacher.path, config.rollout.max_row_tokens
        own = config_of(config, teacher)
        try:
            model = _described(own, path)
        except CheckpointError as error:
            found.append(f"algorithm.teachers: {option}: {error}")
            continue
        reasons = _layout_violations(own, path, model, teacher.parallel)
        reasons += _of_backend(own, model, on)
        if other := different_tokens(config.model.path, path):
            reasons.append(f"{other}. Take a teacher with the policy's tokenizer.")
        if why := _too_many_tokens(teacher, model.vocabulary):
            reasons.append(why)
        if model.max_positions < longest:
            reasons.append(
                f"it knows {model.max_positions} positions, and rows have up to {longest} tokens."
            )
        found += [f"algorithm.teachers: {option}={path}: {reason}" for reason in reasons]
    return found


def _drafts(config: RunConfig, policy: ModelDescription) -> list[str]:
    """Returns the reasons why the policy can't decode speculatively as the config says."""
    drafts = config.rollout.speculative
    if drafts.draft_tokens and (reason := forbids_drafts(config.model.path, drafts.type)):
        return [reason]
    if not isinstance(drafts, DraftModel):
        return []
    option = f"rollout.speculative.path={drafts.path}"
    if reason := forbids_drafts(drafts.path, drafts.type):
        return [reason]
    said = read_json_object(Path(drafts.path) / "config.json")
    said = said.get("text_config") or said
    longest = config.rollout.max_row_tokens + drafts.draft_tokens
    if said.get("max_position_embeddings", longest) < longest:
        return [
            f"{option} knows {said['max_position_embeddings']} positions; it reads rows and drafts of up to {longest} tokens."
        ]
    if said.get("num_attention_heads", 0) % config.rollout.tensor:
        return [
            f"{option} has {said['num_attention_heads']} attention heads, which rollout.tensor={config.rollout.tensor} does not "
            "divide."
        ]
    if "vision_config" in read_json_object(Path(config.model.path) / "config.json"):
        return [f"{option}: vLLM has no draft models for vision-language models. Take type=lookup."]
    vocabulary = said.get("vocab_size")
    if vocabulary != policy.vocabulary:
        return [
            f"{option} has a vocabulary of {vocabulary}, the policy one of {policy.vocabulary}."
        ]
    if other := different_tokens(config.model.path, drafts.path):
        return [f"{option}: {other}. Take a draft model with the policy's tokenizer."]
    return []


def _too_many_tokens(teacher: Teacher, vocabulary: int) -> str:
    """Returns why top_k does not suit a teacher with this vocabulary; "" if it does."""
    if teacher.vocabulary != "top_k" or teacher.top_k < vocabulary:
        return ""
    return f"top_k={teacher.top_k} must be below its vocabulary, {vocabulary}."


def _adapters_of_critic(config: RunConfig, path: str) -> list[str]:
    """Returns the reason why the critic, from the folder `path`, can't have adapters on the
    policy's targets; [] if it can.
    """
    if not config.model.lora.rank:
        return []
    try:
        _adapted(config, path, value=True)
    except ConfigError as error:
        return [f"For the critic, critic.path={path}: {error}"]
    return []


def _value_model(
    config: RunConfig,
    what: str,
    option: str,
    path: str,
    parallel: ParallelConfig,
    policy: ModelDescription,
) -> list[str]:
    longest = config.rollout.max_row_tokens
    try:
        model = _described(config, path)
    except CheckpointError as error:
        return [f"{option}: {error}"]
    reasons = _layout_violations(config, path, model, parallel)
    if backend_of(config).any_decoder:
        reasons += _unbuildable(path, value_model=True)
    found = [f"For the {what}: {reason}" for reason in reasons]
    if model.vocabulary != policy.vocabulary:
        found.append(
            f"{option}={path} knows {model.vocabulary} tokens, the policy {policy.vocabulary}: it reads the policy's tokens. "
            "Take one with the policy's tokenizer."
        )
    if model.max_positions < longest:
        found.append(
            f"{option}={path} knows {model.max_positions} positions; it reads rows of up to {longest} tokens."
        )
    return found


def dry_run(config: RunConfig, world_size: int) -> str:
    """Returns a text with the process layout, the batch arithmetic and the parameters per rank."""
    model, parallel = _counted(config, config.model.path), config.parallel
    replica = parallel.tensor * parallel.context * parallel.pipeline
    data = world_size // replica
    layout = _layout(config, world_size)
    rows = rows_of(config)
    completions = rows // config.trainer.prompts_per_step
    batch = f"{config.trainer.prompts_per_step} prompts x {completions} completions = {rows} rows"
    lines = [
        f"model       {model.family}, {model.parameters:,} parameters, {model.layers} layers, vocabulary {model.vocabulary}",
        f"backend     {config.backend}",
        f"processes   {world_size} = {layout}",
        f"engines     {_engines(config, world_size)}",
        f"batch       {batch} a step, "
        f"{config.algorithm.steps_per_rollout} optimizer step(s) of about {rows // config.algorithm.updates_per_epoch} rows, "
        f"about {rows / config.algorithm.updates_per_epoch / data:g} rows a data-parallel rank",
        f"micro-batch at most {config.trainer.max_tokens_per_micro_batch} tokens",
        *_told_of_teachers(config, world_size),
    ]
    if not backend_of(config).layouts:
        each = -(-model.parameters * parallel.replicas // world_size)
        return "\n".join([*lines, f"parameters a rank: about {each:,}"])
    rules = table(read_hf_config(config.model.path))
    lines.append("parameters a rank (of one replica):")
    for rank in replicas(world_size, parallel)[0]:
        place = place_of(rank, world_size, parallel)
        held = holdings(rules, model, parallel, **place._asdict())
        parameters = sum(shard_shape(item.rule, item.rank, item.ranks).numel() for item in held)
        lines.append(
            f"  rank {rank}: tensor {place.tensor_rank}, stage {place.stage}: {parameters:,}"
        )
    return "\n".join(lines)


def _layout(config: RunConfig, world_size: int) -> str:
    """Returns a text that describes the layout of `config.parallel` with the backend of `config`."""
    parallel = config.parallel
    if backend_of(config).layouts:
        replica = parallel.tensor * parallel.context * parallel.pipeline
        return layout_name(parallel, world_size // replica)
    shards = world_size // parallel.replicas // parallel.tensor
    shared = f" x TP {parallel.tensor}" if parallel.tensor > 1 else ""
    return f"{parallel.replicas} replica(s), each over {shards}{shared}"


def _told_of_teachers(config: RunConfig, world_size: int) -> list[str]:
    """Returns a line for each teacher that the run holds: model, backend and layout."""
    found = []
    teachers = config.algorithm.teachers
    for name, teacher in zip(names_of(teachers), teachers, strict=True):
        if teacher.loads:
            own = config_of(config, teacher)
            model = _counted(own, teacher.path)
            layout = _layout(own, world_size)
            found.append(
                f"{name:<11} {model.family}, {model.parameters:,} parameters, backend {own.backend}, {layout}"
            )
    return found


def _engines(config: RunConfig, world_size: int) -> str:
    if config.algorithm.task != "rl":
        return "none"
    engines = (
        config.rollout.servers
        if config.strategy == "separate"
        else world_size // config.rollout.tensor
    )
    return f"{engines} x {config.rollout.engine}, {config.rollout.tensor} process(es) each, {config.strategy}"


def slow_modules(config: RunConfig) -> list[str]:
    """Returns the names of the Python modules of the chosen backends and engine, whose imports take
    seconds.
    """
    teachers = [each for each in config.algorithm.teachers if each.loads]
    own = [config, *(config_of(config, teacher) for teacher in teachers)]
    found = list(dict.fromkeys(backend_of(each).module for each in own))
    if (
        config.algorithm.task != "rl"
        or config.strategy == "separate"
        or not engine_of(config.rollout).has_model
    ):
        return found
    return [*found, f"rftmega.rollout.engines.{config.rollout.engine}"]
