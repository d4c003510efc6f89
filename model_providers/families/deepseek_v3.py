"""DeepSeek-V3: latent attention; dense first layers, then MoE layers with shared experts and
sigmoid router scores with a selection bias.
Its multi-token prediction layers (`num_nextn_predict_layers`) are ignored, as in transformers.
"""

from dataclasses import replace

from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import Experts, LatentAttention, ModelDescription, decoder
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    for name, value in (
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
    ):
        config.only(name, value, why="it is what transformers computes for this family")
    config.only(
        "rope_interleave",
        True,
        why="Megatron-Core 0.16 rotates this family's neighbouring elements as pairs",
    )
    for unused in (
        "num_nextn_predict_layers",
        "ep_size",
        "seq_aux",
        "aux_loss_alpha",
        "qk_head_dim",
    ):
        config.get(unused)
    config.only(
        "num_key_value_heads",
        config["num_attention_heads"],
        why="every head has keys and values of its own",
    )
    latent = LatentAttention(
        query_rank=config.get("q_lora_rank"),
        key_value_rank=config["kv_lora_rank"],
        plain_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
    )
    config.only("head_dim", latent.rope_dim, why="transformers takes it for qk_rope_head_dim")
    if latent.rope_dim % 2:
        raise CheckpointError(
            f"qk_rope_head_dim={latent.rope_dim} is odd, which rotary embeddings can't halve."
        )
    model = decoder(config, qk_norm=True, head_dim=latent.plain_dim + latent.rope_dim)
    if model.rope.kind not in ("default", "yarn") or (
        model.rope.yarn and not model.rope.yarn.truncate
    ):
        raise CheckpointError(
            f"rope_type={model.rope.kind!r} is not supported with latent attention; default and yarn are."
        )
    experts = sigmoid_experts(config, model.layers)
    return replace(model, latent=latent, experts=experts)


def sigmoid_experts(config: HFConfig, layers: int) -> Experts:
    """Returns the description of MoE layers that follow the dense first layers and select experts
    by sigmoid scores, within groups. `layers`: number of decoder layers, dense ones included.

    Raises CheckpointError for settings with which Megatron-Core 0.16 would select or weight experts
    differently.
    """
    config.only("norm_topk_prob", True, why="Megatron-Core 0.16 always normalises sigmoid scores")
    ffn, active, groups = (
        config["moe_intermediate_size"],
        config["num_experts_per_tok"],
        config["n_group"],
    )
    experts = Experts(
        number=config["n_routed_experts"],
        active=active,
        ffn=ffn,
        layers=frozenset(range(config["first_k_dense_replace"], layers)),
        normalised=True,
        shared_ffn=config["n_shared_experts"] * ffn,
        sigmoid=True,
        groups=groups,
        active_groups=config["topk_group"],
        scale=config["routed_scaling_factor"],
    )
    if groups > 1 and active != 2 * experts.active_groups:
        raise CheckpointError(
            f"num_experts_per_tok={active} with topk_group={experts.active_groups} is not supported: Megatron-Core 0.16 scores a "
            "group by its best num_experts_per_tok / topk_group experts, transformers by its best 2."
        )
    if active == 1:
        raise CheckpointError(
            "num_experts_per_tok=1 is not supported with sigmoid scores: Megatron-Core 0.16 does not normalise a single one, "
            "transformers does."
        )
    return experts
