"""Decides whether a weight sync sends LoRA adapters separately or merged into the weights."""

from pathlib import Path

from rftmega.config.capabilities import engine_of
from rftmega.config.options.adapters import OF_VOCABULARY
from rftmega.config.schema import RunConfig
from rftmega.core.errors import RFTMegaError
from rftmega.core.json_files import read_json_object

# dense models (model_type) whose adapters vLLM 0.32 serves, as tested with weight syncs;
# for the first three also on embedding and LM head
SERVED_VOCABULARY = ("llama", "phi3", "qwen3")
SERVED = (*SERVED_VOCABULARY, "qwen2")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def served_rank(config: RunConfig) -> int:
    """Returns the rank of the LoRA adapters that a weight sync sends to engines separately; 0 if it
    sends merged weights.
    """
    lora = config.model.lora
    as_such = lora.push == "adapters" or (lora.push == "auto" and not why_merged(config))
    return lora.rank if as_such else 0


def why_merged(config: RunConfig) -> str:
    """Returns the reason why engines need merged weights in this run; "" if they can take the
    adapters separately.
    """
    rollout, lora = config.rollout, config.model.lora
    if not engine_of(rollout).serves_adapters:
        return f"rollout.engine={rollout.engine} takes merged weights"
    if rollout.transport == "checkpoint":
        return "rollout.transport=checkpoint is for servers that take merged weights"
    if rollout.quantization != "none":
        return f"rollout.quantization={rollout.quantization} was not tried with adapters"
    if config.model.dtype == "float32" and not lora.evaluated:
        return (
            "in float32 merging rounds next to nothing, and engines sample faster without adapters"
        )
    try:
        fields = read_json_object(Path(config.model.path) / "config.json")
    except (OSError, RFTMegaError):
        return f"{config.model.path} has no config.json that can be read"
    family = fields.get("model_type")
    if any(fields.get(name) for name in EXPERTS):
        return "vLLM takes no experts' weights in a push once it serves adapters"
    if family not in SERVED:
        return f"vLLM was not tried with adapters of {family} models"
    if set(lora.targets) & set(OF_VOCABULARY) and family not in SERVED_VOCABULARY:
        return f"vLLM leaves adapters on embedding and head out of models of {family}"
    return ""
