"""Builds the engine that `rollout.engine` names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rftmega.config import RunConfig, served_rank
from rftmega.converters import table
from rftmega.converters.rules import instances
from rftmega.core.expert_routes import RoutedModel
from rftmega.core.shards import is_linear
from rftmega.model_providers.description import Experts, describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.rollout.engines import Engine, ScriptedEngine
from rftmega.runtime.parallel.process_group import World
from rftmega.runtime.parallel.run_identity import run_identity


def create(
    config: RunConfig,
    world: World,
    *,
    vocabulary: int,
    stop_ids: Sequence[int],
    experts: Experts | None = None,
) -> Engine:
    """Builds this process's engine, or its client of separate servers. Returns the engine, which has
    no weights before the first push.

    `vocabulary`: number of token ids; `stop_ids`: tokens that end a completion; `experts`: the
    experts of a MoE policy, else None.
    """
    routed = None
    if config.rollout.router_replay == "engine" and experts is not None:
        routed = RoutedModel(tuple(sorted(experts.layers)), experts.number, experts.active)
    build = _servers if config.strategy == "separate" else COLOCATED[config.rollout.engine]
    return build(config, world, vocabulary=vocabulary, stop_ids=stop_ids, routed=routed)


def _scripted(config: RunConfig, world: World, **named: Any) -> Engine:
    return ScriptedEngine(
        config.rollout, vocabulary=named["vocabulary"], stop_ids=named["stop_ids"]
    )


def _transformers(config: RunConfig, world: World, **named: Any) -> Engine:
    from rftmega.rollout.engines.transformers import TransformersEngine

    return TransformersEngine(
        config.model.path,
        config.rollout,
        stop_ids=named["stop_ids"],
        where=world.device,
        routed=named["routed"],
    )


def _vllm(config: RunConfig, world: World, **named: Any) -> Engine:
    from rftmega.rollout.engines.vllm import VLLMEngine

    return VLLMEngine(
        config.model.path,
        config.rollout,
        world,
        dtype=config.model.dtype,
        stop_ids=named["stop_ids"],
        adapter_rank=served_rank(config),
        evaluated=config.model.lora.evaluated,
        routed=named["routed"],
        unquantised=unquantised(config),
    )


def _servers(config: RunConfig, world: World, **named: Any) -> Engine:
    """Returns a ServerEngine, which presents vLLM servers, or remote SGLang servers, as one engine.
    `named`: `vocabulary`, `stop_ids` and the experts whose routes are recorded; see `create`.
    """
    from rftmega.rollout.servers.server_engine import ServerEngine

    return ServerEngine(
        config.model.path,
        config.rollout,
        world,
        dtype=config.model.dtype,
        logs=f"{config.trainer.output}/servers",
        adapter_rank=served_rank(config),
        unquantised=unquantised(config),
        run=run_identity(Path(config.trainer.output)),
        **named,
    )


COLOCATED = {"scripted": _scripted, "transformers": _transformers, "vllm": _vllm}


def unquantised(config: RunConfig) -> list[str]:
    """Returns the names of the modules that keep their precision under rollout.quantization; an
    empty list without quantization.
    """
    return [] if config.rollout.quantization == "none" else modules_kept(config.model.path)


def modules_kept(folder: str) -> list[str]:
    """Returns the names of the modules with a matrix that quantization of linear layers leaves
    unchanged: embeddings, LM heads, routers. `folder`: the model's Hugging Face folder.
    """
    description = describe(read_hf_config(folder))
    experts = description.experts.number if description.experts else 0
    found = []
    for rule, layer, expert in instances(
        table(read_hf_config(folder)), layers=description.layers, experts=experts
    ):
        for name, tensor in zip(rule.hf_names(layer, expert), rule.hf, strict=True):
            if rule.exported and len(tensor.shape) == 2 and not is_linear(name):
                found.append(name.removesuffix(".weight"))
    return found
