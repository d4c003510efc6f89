"""Builds the engine that `rollout.engine` names."""

from collections.abc import Sequence

from rftmega.columns.expert_routes import RoutedModel
from rftmega.config import RunConfig
from rftmega.model_providers.description import Experts
from rftmega.parallel.process_group import World
from rftmega.rollout import Engine, ScriptedEngine


def create(
    config: RunConfig,
    world: World,
    *,
    vocabulary: int,
    stop_ids: Sequence[int],
    experts: Experts | None = None,
) -> Engine:
    """Returns the engine on this process; it holds no weights until the first push. `experts`: of the
    policy, where it is a mixture.
    """
    routed = None
    if config.rollout.router_replay == "engine" and experts is not None:
        routed = RoutedModel(tuple(sorted(experts.layers)), experts.number, experts.active)
    if config.rollout.engine == "scripted":
        return ScriptedEngine(config.rollout, vocabulary=vocabulary, stop_ids=stop_ids)
    if config.rollout.engine == "transformers":
        from rftmega.rollout.transformers import TransformersEngine

        return TransformersEngine(
            config.model.path,
            config.rollout,
            stop_ids=stop_ids,
            where=world.device,
            routed=routed,
        )
    assert config.rollout.engine in ("vllm", "sglang"), config.rollout.engine
    if config.strategy == "separate":
        from rftmega.fleet.server_engine import ServerEngine

        logs = f"{config.trainer.output}/servers"
        return ServerEngine(
            config.model.path,
            config.rollout,
            world,
            dtype=config.model.dtype,
            stop_ids=stop_ids,
            logs=logs,
            adapter_rank=config.model.lora.served_rank,
            routed=routed,
        )
    from rftmega.rollout.vllm import VLLMEngine

    return VLLMEngine(
        config.model.path,
        config.rollout,
        world,
        dtype=config.model.dtype,
        stop_ids=stop_ids,
        adapter_rank=config.model.lora.served_rank,
        evaluated=config.model.lora.evaluated,
        routed=routed,
    )
