"""Capabilities of backends and engines.

Checks, planner and placement ask for a capability instead of comparing names, so that a new backend
or engine is described only here and in its own module.
"""

from dataclasses import dataclass

from rftmega.config.schema import RolloutConfig, RunConfig


@dataclass(frozen=True)
class BackendTraits:
    """Capabilities of a training backend.

    module, name: module and name of the backend's class. any_decoder: trains every decoder that
    transformers supports, without a conversion table. layouts: supports pipeline, context and
    expert parallelism and the related Megatron options. frees_gradients: holds gradients only
    during the update. optimizers: supports optimizers other than Adam and optimizer states other
    than float32. base_on_host: can keep the frozen weights on the host in int8
    (model.lora.base_on_host). router_replay: accepts recorded expert routes. names_linear: knows
    which modules an FP8 engine must not quantize.
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
    can start it. has_model: samples from a model's weights, not from a script. side_by_side:
    generates several completions at once, and continues interrupted completions. split: runs
    tensor-parallel over processes, restarts without the trainer, and has options for its memory.
    vllm_kernels: computes with vLLM's kernels, and has their limits. transformers_class: runs
    transformers' class of the model. serves_adapters: takes LoRA adapters without merging.
    returns_routes: returns the experts of each token. quantizes: computes with FP8 or int8 weights.
    speculates: verifies drafted tokens (rollout.speculative).
    broadcasts: receives weights over the network by joining a process group with the trainer,
    instead of by messages.
    """

    colocated: bool = True
    served: bool = False
    started_here: bool = True
    has_model: bool = True
    side_by_side: bool = True
    split: bool = False
    vllm_kernels: bool = False
    transformers_class: bool = False
    serves_adapters: bool = False
    returns_routes: bool = False
    quantizes: bool = False
    speculates: bool = False
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
        served=True,
        split=True,
        vllm_kernels=True,
        serves_adapters=True,
        returns_routes=True,
        quantizes=True,
        speculates=True,
    ),
    "sglang": EngineTraits(colocated=False, served=True, started_here=False, broadcasts=True),
    "transformers": EngineTraits(
        side_by_side=False, transformers_class=True, returns_routes=True, quantizes=True
    ),
    "scripted": EngineTraits(has_model=False),
}


def backend_of(config: RunConfig) -> BackendTraits:
    """Returns the capabilities of the run's backend; Megatron's for an unknown name, which other
    checks report.
    """
    return BACKENDS.get(config.backend, BACKENDS["megatron"])


def engine_of(rollout: RolloutConfig) -> EngineTraits:
    """Returns the capabilities of the rollout engine; the defaults for an unknown name, which other
    checks report.
    """
    return ENGINES.get(rollout.engine, EngineTraits())
