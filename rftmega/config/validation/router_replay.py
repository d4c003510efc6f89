"""Checks of router replay in MoE models."""

from rftmega.config.capabilities import backend_of, engine_of
from rftmega.config.schema import RunConfig


def router_replay(config: RunConfig) -> list[str]:
    """Returns the conflicts of rollout.router_replay with other options."""
    chosen = config.rollout.router_replay
    if chosen == "none":
        return []
    given = f"rollout.router_replay={chosen}"
    found = []
    if not backend_of(config).router_replay:
        found.append(
            f"{given} needs backend=megatron: routers of transformers take no routes. Set it to none."
        )
    engine = config.rollout.engine
    if chosen == "engine" and not engine_of(config.rollout).returns_routes:
        found.append(
            f"{given} needs rollout.engine=vllm or transformers: {engine} tells of no experts. Set it to trainer."
        )
    if (
        chosen == "engine"
        and config.strategy == "separate"
        and config.rollout.transport == "checkpoint"
    ):
        found.append(
            f"{given} needs servers with this package: rollout.transport=checkpoint is for others. Set it to trainer."
        )
    return found
