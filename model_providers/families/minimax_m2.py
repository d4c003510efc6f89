"""MiniMax-M2: norms of q and k over all heads, and MoE in every layer with sigmoid router scores."""

from dataclasses import replace

from rftmega.converters.decoder import number_of_experts
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import Experts, ModelDescription, decoder
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    for name, value in (("scoring_func", "sigmoid"), ("use_routing_bias", True)):
        config.only(name, value, why="it is what transformers computes for this family")
    model = decoder(config, qk_norm=True, partial_rope=True)
    if (active := config["num_experts_per_tok"]) == 1:
        raise CheckpointError(
            "num_experts_per_tok=1 is not supported with sigmoid scores: Megatron-Core 0.16 does not normalise a single one, "
            "transformers does."
        )
    experts = Experts(
        number=number_of_experts(config),
        active=active,
        ffn=model.ffn,
        layers=frozenset(range(model.layers)),
        normalised=True,
        sigmoid=True,
    )
    model = replace(model, full_width_qk_norm=True, experts=experts)
    return replace(model, rope=replace(model.rope, fraction=_fraction(config, model)))


def _fraction(config: HFConfig, model: ModelDescription) -> float:
    """Returns the part of a head that is rotated; published folders give it as `rotary_dim`, in
    elements. Raises CheckpointError for a number that rotary embeddings can't halve.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    turned = config.get("rotary_dim")
    if turned is None or "partial_rotary_factor" in rope or "partial_rotary_factor" in config:
        return model.rope.fraction
    if turned % 2 or turned > model.head_dim:
        raise CheckpointError(
            f"rotary_dim={turned} of heads of {model.head_dim}: it must be even, and no more than a head has."
        )
    return float(turned) / model.head_dim
