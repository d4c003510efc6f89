"""The options with which a teacher of the policy is built."""

from dataclasses import replace
from typing import Literal

from rftmega.config.options.adapters import LoRA
from rftmega.config.options.teachers import Teacher
from rftmega.config.schema import OptimizerConfig, RunConfig


def config_of(config: RunConfig, teacher: Teacher) -> RunConfig:
    """Returns the config from which a teacher is built: its own folder, backend and layout, and
    nothing that is only for a model that learns, or for the policy's backend.
    """
    backends: dict[str, Literal["megatron", "fsdp"]]
    backends = {"auto": config.backend, "megatron": "megatron", "fsdp": "fsdp"}
    backend = backends[teacher.backend]
    model = replace(config.model, path=teacher.path, lora=LoRA(), dropout=0.0, freeze_vision=False)
    if backend != config.backend:
        model = replace(model, fp8="none")
    kl = replace(config.algorithm.kl, coef=0.0)
    algorithm = replace(config.algorithm, kl=kl, ema_beta=0.0)
    return replace(
        config,
        backend=backend,
        model=model,
        algorithm=algorithm,
        rollout=replace(config.rollout, router_replay="none"),
        parallel=teacher.parallel,
        optimizer=OptimizerConfig(),
    )
