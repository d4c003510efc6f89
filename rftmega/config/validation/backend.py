"""Checks of options that depend on the training backend."""

from dataclasses import fields

from rftmega.config.capabilities import backend_of
from rftmega.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from rftmega.config.tree import value_of

OF_FSDP = ("replicas", "reshard_after_forward", "cpu_offload")
BY_BOTH = (*OF_FSDP, "recompute", "tensor")
MEGATRONS = ("distributed", "overlap_grad_reduce", "overlap_param_gather")


def backend(config: RunConfig, world_size: int) -> list[str]:
    """Returns the problems of options that the chosen backend does not support."""
    of_critic = config.algorithm.advantage.needs_critic
    sections = ["", "critic."] if of_critic else [""]
    found = []
    for section in sections:
        found += of_section(config, section, world_size)
    if not backend_of(config).layouts:
        found += _models(config)
    return list(dict.fromkeys(found))


def of_section(config: RunConfig, section: str, world_size: int) -> list[str]:
    """Returns the problems of the layout and optimizer of one model with the chosen backend;
    `section`: "critic." for the critic's options, "" for the policy's.
    """
    if backend_of(config).layouts:
        return _megatron(config, section) + _fp8(config, section)
    return _fsdp(config, section, world_size)


def _megatron(config: RunConfig, section: str) -> list[str]:
    return [
        f"{section}parallel.{name}={value} needs backend=fsdp; Megatron-Core has no such thing. Leave it out."
        for name, value in _given(config, f"{section}parallel", ParallelConfig, OF_FSDP)
    ]


def _fp8(config: RunConfig, section: str) -> list[str]:
    """Returns the conflicts of model.fp8 (Transformer Engine's FP8 matmuls) with other options;
    `section`: "critic." for the critic's options, "" for the policy's.
    """
    if config.model.fp8 == "none":
        return []
    found, said = [], f"model.fp8={config.model.fp8}"
    if config.model.dtype == "float32":
        found.append(
            f"{said} multiplies bfloat16 in 8 bits, not model.dtype=float32. Leave one of both out."
        )
    if value_of(config, f"{section}parallel").recompute == "full":
        found.append(
            f"{said} with {section}parallel.recompute=full is not supported: Megatron then computes again by Transformer "
            "Engine's own way, which was not tried. Set it to selective or none."
        )
    return found


def _fsdp(config: RunConfig, section: str, world_size: int) -> list[str]:
    unknown = [each.name for each in fields(ParallelConfig) if each.name not in BY_BOTH]
    found = [
        f"{section}parallel.{name}={value} needs backend=megatron; FSDP shards every layer over the processes. Leave it out."
        for name, value in _given(config, f"{section}parallel", ParallelConfig, unknown)
    ]
    found += [
        f"{section}optimizer.{name}={value} is Megatron's; backend=fsdp always shards the optimizer and overlaps. Leave it out."
        for name, value in _given(config, f"{section}optimizer", OptimizerConfig, MEGATRONS)
    ]
    parallel = value_of(config, f"{section}parallel")
    if parallel.recompute == "selective":
        found.append(
            f"{section}parallel.recompute=selective needs backend=megatron; FSDP computes whole layers again. Set it to full."
        )
    tensor = parallel.tensor
    if not world_size % tensor and world_size // tensor % parallel.replicas:
        shared = f", {tensor} of which share each matrix" if tensor > 1 else ""
        found.append(
            f"{section}parallel.replicas={parallel.replicas} does not divide the {world_size} launched processes{shared}: each "
            "replica has as many. Lower it, or launch a multiple of it."
        )
    return found


def _models(config: RunConfig) -> list[str]:
    found = [
        f"model.{name}={value} needs backend=megatron; backend=fsdp trains a model as transformers computes it. "
        "Leave it out."
        for name, value in _given(config, "model", ModelConfig, ("dropout", "freeze_vision", "fp8"))
    ]
    rates = _given(config, "optimizer", OptimizerConfig, ("vision_learning_rate",))
    return found + [
        f"optimizer.{name}={value} needs backend=megatron; backend=fsdp has one learning rate. Leave it out."
        for name, value in rates
    ]


def _given(
    config: RunConfig, section: str, kind: type, names: tuple[str, ...] | list[str]
) -> list[tuple[str, object]]:
    """Returns name and value of the options `names` in a section (dataclass `kind`) that differ
    from their defaults.
    """
    chosen, plain = value_of(config, section), kind()
    pairs = [(name, getattr(chosen, name)) for name in names]
    return [(name, value) for name, value in pairs if value != getattr(plain, name)]
