"""Builds the engine that `rollout.engine` names."""

from collections.abc import Sequence
from pathlib import Path

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
    """Returns the engine on this process; it holds no weights until the first push. `experts`: of
    the policy, if it is a MoE.
    """
    routed = None
    if config.rollout.router_replay == "engine" and experts is not None:
        routed = RoutedModel(tuple(sorted(experts.layers)), experts.number, experts.active)
    if config.rollout.engine == "scripted":
        return ScriptedEngine(config.rollout, vocabulary=vocabulary, stop_ids=stop_ids)
    if config.rollout.engine == "transformers":
        from rftmega.rollout.engines.transformers import TransformersEngine

        return TransformersEngine(
            config.model.path,
            config.rollout,
            stop_ids=stop_ids,
            where=world.device,
            routed=routed,
        )
    assert config.rollout.engine in ("vllm", "sglang"), config.rollout.engine
    kept = unquantised(config)
    if config.strategy == "separate":
        from rftmega.rollout.servers.server_engine import ServerEngine

        logs = f"{config.trainer.output}/servers"
        return ServerEngine(
            config.model.path,
            config.rollout,
            world,
            dtype=config.model.dtype,
            stop_ids=stop_ids,
            logs=logs,
            adapter_rank=served_rank(config),
            routed=routed,
            unquantised=kept,
            vocabulary=vocabulary,
            run=run_identity(Path(config.trainer.output)),
        )
    from rftmega.rollout.engines.vllm import VLLMEngine

    return VLLMEngine(
        config.model.path,
        config.rollout,
        world,
        dtype=config.model.dtype,
        stop_ids=stop_ids,
        adapter_rank=served_rank(config),
        evaluated=config.model.lora.evaluated,
        routed=routed,
        unquantised=kept,
    )


def unquantised(config: RunConfig) -> list[str]:
    """Returns the modules that keep their precision under rollout.quantization; [] without it."""
    return [] if config.rollout.quantization == "none" else modules_kept(config.model.path)


def modules_kept(folder: str) -> list[str]:
    """Returns the modules with a matrix that quantization of linear layers leaves unchanged:
    embeddings, LM heads, routers.
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
