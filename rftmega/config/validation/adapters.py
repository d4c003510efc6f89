"""Checks of LoRA adapters."""

import re
from pathlib import Path

from rftmega.config.capabilities import backend_of, engine_of
from rftmega.config.options.adapters import (
    EMBEDDING,
    HEAD,
    HF_TARGETS,
    MEGATRON_HEAD,
    MEGATRON_TARGETS,
    OF_VOCABULARY,
    RANKS,
    LoRA,
)
from rftmega.config.options.peft_fields import foreign_fields
from rftmega.config.pushed_adapters import served_rank
from rftmega.config.schema import RunConfig
from rftmega.core.errors import RFTMegaError
from rftmega.core.json_files import read_json_object

NAMES = ("alpha", "rslora", "targets", "push", "base_on_host", "dropout", "path", "evaluated")
TOWERS = ("vision_config", "audio_config")


def adapters(config: RunConfig) -> list[str]:
    """Returns the problems of model.lora. Whether the model has the layers in `targets` is checked
    later, with its conversion table.
    """
    lora = config.model.lora
    if not lora.rank:
        plain = LoRA()
        return [
            f"model.lora.{name}={value} needs model.lora.rank above 0: there are no adapters. Leave it out."
            for name in NAMES
            if (value := getattr(lora, name)) != getattr(plain, name)
        ]
    return (
        _unsupported(config)
        + _base_on_host(config)
        + _of_engine(config)
        + _targets(config)
        + _path(config)
        + _evaluated(config)
    )


def _unsupported(config: RunConfig) -> list[str]:
    if not any(_fields(config).get(tower) for tower in TOWERS):
        return []
    return [
        f"model.lora.rank={config.model.lora.rank}: {config.model.path} has a tower that sees or hears; such models can't have "
        "adapters yet. Set it to 0."
    ]


def _base_on_host(config: RunConfig) -> list[str]:
    if config.model.lora.base_on_host == "whole":
        return []
    said = f"model.lora.base_on_host={config.model.lora.base_on_host}"
    if not backend_of(config).base_on_host:
        return [f"{said} needs backend=megatron. Leave it out."]
    if config.algorithm.task == "rl" and config.trainer.offload:
        return []
    return [
        f"{said} needs algorithm.task=rl and trainer.offload=true: without them no weights wait on the host. Leave it out."
    ]


def _fields(config: RunConfig) -> dict[str, object]:
    """Returns the content of the model's config.json; {} if it cannot be read, which other checks
    report.
    """
    try:
        return read_json_object(Path(config.model.path) / "config.json")
    except (OSError, RFTMegaError):
        return {}


def _of_engine(config: RunConfig) -> list[str]:
    rank = config.model.lora.rank
    engine = config.rollout.engine
    found = []
    if config.model.lora.push == "adapters" and not engine_of(config.rollout).serves_adapters:
        found.append(
            f"model.lora.push=adapters: rollout.engine={engine} takes merged weights. Leave it out."
        )
    if config.model.lora.push == "adapters" and config.rollout.transport == "checkpoint":
        found.append(
            "model.lora.push=adapters: rollout.transport=checkpoint is for servers without this package, which take merged "
            "weights. Set it to network or disk, or leave model.lora.push out."
        )
    if (
        config.algorithm.task != "rl"
        or not engine_of(config.rollout).serves_adapters
        or rank in RANKS
    ):
        return found
    return [
        *found,
        f"model.lora.rank={rank} is none that vLLM serves (max_lora_rank). Choose one of: {', '.join(map(str, RANKS))}.",
    ]


def _targets(config: RunConfig) -> list[str]:
    lora = config.model.lora
    of_vocabulary = [name for name in lora.targets if name in OF_VOCABULARY]
    found = []
    of_megatron = MEGATRON_TARGETS if backend_of(config).layouts else ()
    known = (*HF_TARGETS, *of_megatron, EMBEDDING, HEAD)
    taken = (*known, *OF_VOCABULARY) if backend_of(config).layouts else known
    heads = [name for name in of_vocabulary if name in (HEAD, MEGATRON_HEAD)]
    if heads and config.algorithm.task == "reward_model":
        found.append(
            f"model.lora.targets: {', '.join(heads)}: a reward model has no output head; its value head learns whole. "
            "Leave it out."
        )
    if unknown := [name for name in lora.targets if name not in taken]:
        found.append(
            f"model.lora.targets: {', '.join(unknown)} is no linear layer of attention or MLP. Choose from: {', '.join(known)}."
        )
    return found


def _evaluated(config: RunConfig) -> list[str]:
    """Returns the problems of model.lora.evaluated, adapters that are evaluated in addition to the
    policy's.
    """
    lora = config.model.lora
    if not lora.evaluated:
        return []
    said = "model.lora.evaluated"
    found = []
    if not served_rank(config) or config.strategy != "colocated":
        found.append(
            f"{said} needs model.lora.push=adapters and strategy=colocated: engines with merged weights, and servers, "
            "answer with the policy alone. Leave it out."
        )
    if not config.data.held_out:
        found.append(f"{said} needs data.eval or data.evals: nothing else asks these adapters.")
    for name, folder in lora.evaluated.items():
        found += _named(name, config) + _readable(f"{said}.{name}={folder}", folder, lora)
    return found


def _named(name: str, config: RunConfig) -> list[str]:
    if not re.fullmatch(r"[\w-]+", name):
        return [
            f"model.lora.evaluated: {name!r} becomes a part of metrics' names. Use letters, digits, _ and - only."
        ]
    if name in config.data.evals:
        return [
            f"model.lora.evaluated: {name} is a set of data.evals, whose metrics have that name. Take another."
        ]
    return []


def _readable(said: str, folder: str, lora: LoRA) -> list[str]:
    """Returns the reasons why the adapters in `folder` cannot be evaluated beside the policy's,
    whose options are `lora`; no reasons for an empty name, which means no adapters. `said` begins
    the messages.
    """
    if not folder:
        return []
    try:
        fields = read_json_object(Path(folder) / "adapter_config.json")
    except (OSError, RFTMegaError):
        return [f"{said} has no adapter_config.json that can be read: it is no folder of PEFT."]
    found = [f"{said}: {reason}." for reason in foreign_fields(fields)]
    rank = fields.get("r")
    if not isinstance(rank, int) or rank > lora.rank:
        found.append(f"{said} has rank {rank}; engines serve up to model.lora.rank={lora.rank}.")
    return found


def _path(config: RunConfig) -> list[str]:
    path = config.model.lora.path
    if path and config.algorithm.task == "reward_model":
        return [
            f"model.lora.path={path}: algorithm.task=reward_model begins with adapters that change nothing. Leave it out; "
            "to go on from others, set model.path to their merged folder."
        ]
    if not path or (Path(path) / "adapter_config.json").is_file():
        return []
    return [f"model.lora.path={path} has no adapter_config.json: it is no folder of PEFT."]
