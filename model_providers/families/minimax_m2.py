"""MiniMax-M2: norms of q and k over all heads, and MoE in every layer with sigmoid router scores."""

from dataclasses import replace

from rftmega.converters.decoder import number_of_experts
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import Experts, ModelDescription, decoder
from rftmega.model_providers.hf_config import HFConfig

# fields of published folders that transformers' class does not read
ONLY = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "attn_window_size": None,
    "shared_intermediate_size": 0,
    "routed_scaling_factor": 1.0,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "num_expert_group": None,
    "sliding_window": None,
}
WITHOUT_EFFECT = (
    *("mlp_intermediate_size", "shared_moe_mode", "swa_rope_theta", "max_model_len"),
    *("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "use_grouped_topk", "topk_group"),
)


def describe(config: HFConfig) -> ModelDescription:
    for name, value in ONLY.items():
        config.only(name, value, why="it is what transformers computes for this family")
    for name in WITHOUT_EFFECT:
        config.get(name)
    kinds = config.get("attn_type_list", [])
    if other := [kind for kind in kinds if kind != 1]:
        raise CheckpointError(f"attn_type_list has {other[0]!r}; only 1, full attention, is known.")
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
    if turned is None or "partial_rotary_factor" in rope or config.said("partial_rotary_factor"):
        return model.rope.fraction
    if turned % 2 or turned > model.head_dim:
        raise CheckpointError(
            f"rotary_dim={turned} of heads of {model.head_dim}: it must be even, and no more than a head has."
        )
    return float(turned) / model.head_dim
