"""Checks of engines that compute with FP8 or int8 weights."""

from rftmega.config.capabilities import backend_of, engine_of
from rftmega.config.options.algorithms import NoImportance
from rftmega.config.schema import RunConfig


def quantization(config: RunConfig) -> list[str]:
    """Returns the conflicts of rollout.quantization with other options."""
    rollout = config.rollout
    if rollout.quantization == "none":
        return []
    given = f"rollout.quantization={rollout.quantization}"
    found = []
    if not engine_of(rollout).quantizes:
        found.append(
            f"{given} needs rollout.engine=vllm or transformers, not {rollout.engine}. Set it to none."
        )
    if config.strategy == "separate" and rollout.transport == "checkpoint":
        found.append(
            f"{given}: rollout.transport=checkpoint is for servers without this package, which quantise nothing. Take network or "
            "disk, or set it to none."
        )
    if engine_of(rollout).vllm_kernels and not backend_of(config).names_linear:
        found.append(
            f"{given} with rollout.engine=vllm needs backend=megatron, whose table says which modules have no such numbers. "
            "Set it to none."
        )
    if isinstance(config.algorithm.importance_sampling, NoImportance):
        found.append(
            f"{given}: completions come from other weights than the trainer's. Correct that by "
            "algorithm.importance_sampling=token (or sequence, masked), or set it to none."
        )
    return found
