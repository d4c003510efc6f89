"""Capabilities of backends and engines.

Checks, planner and placement ask for a capability instead of comparing names, so that a new backend or
engine is described here and in its own module only.
"""

from dataclasses import dataclass

from rftmega.config.schema import RolloutConfig, RunConfig


@dataclass(frozen=True)
class BackendTraits:
    """Capabilities of a training backend.

    module, name: where its class is. any_decoder: builds every decoder of transformers, without a
    conversion table. layouts: supports pipeline, context and expert parallelism and Megatron's
    options of them. frees_gradients: holds gradients during the update only. optimizers: supports
    optimizers and optimizer dtypes other than Adam in float32. base_on_host: can keep a frozen
    base on the host. router_replay: takes expert routes. names_linear: knows which modules an FP8
    engine must not quantize.
    """

    module: str
    name: str
    any_decoder: bool = False
    layouts: bool = False
    frees_gradients: bool = False
    optimizers: bool = False
    base_on_host: bool = False
    router_replay: bool = False
    names_linear: bool = False


@dataclass(frozen=True)
class EngineTraits:
    """Capabilities of a rollout engine.

    colocated: runs in the trainer's processes. served: runs as servers. started_here: this package
    can start it. has_model: samples from weights, rather than a script. side_by_side: generates
    several completions at once, and continues interrupted ones. split: runs tensor-parallel over
    processes, restarts without the trainer, and has options for its memory. serves_adapters: takes
    LoRA adapters without merging. returns_routes: returns the experts of each token. quantizes:
    computes with FP8 or int8 weights. broadcasts: joins one process group with the trainer for
    weights over the network, where others take messages.
    """

    colocated: bool = True
    served: bool = False
    started_here: bool = True
    has_model: bool = True
    side_by_side: bool = True
    split: bool = False
    serves_adapters: bool = False
    returns_routes: bool = False
    quantizes: bool = False
    broadcasts: bool = False


BACKENDS = {
    "megatron": BackendTraits(
        "rftmega.backends.megatron",
        "MegatronBackend",
        layouts=True,
        optimizers=True,
        base_on_host=True,
        router_replay=True,
        names_linear=True,
    ),
    "fsdp": BackendTraits(
        "rftmega.backends.fsdp.backend", "FSDPBackend", any_decoder=True, frees_gradients=True
    ),
}
ENGINES = {
    "vllm": EngineTraits(
        served=True, split=True, serves_adapters=True, returns_routes=True, quantizes=True
    ),
    "sglang": EngineTraits(colocated=False, served=True, started_here=False, broadcasts=True),
    "transformers": EngineTraits(side_by_side=False, returns_routes=True, quantizes=True),
    "scripted": EngineTraits(has_model=False),
}


def backend_of(config: RunConfig) -> BackendTraits:
    """Returns the backend's capabilities; Megatron's for an unknown name, which other checks report."""
    return BACKENDS.get(config.backend, BACKENDS["megatron"])


def engine_of(rollout: RolloutConfig) -> EngineTraits:
    """Returns the engine's capabilities; the defaults for an unknown name, which other checks report."""
    return ENGINES.get(rollout.engine, EngineTraits())
