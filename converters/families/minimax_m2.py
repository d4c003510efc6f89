"""MiniMax-M2: norms of q and k over all heads, and MoE in every layer with a routing bias."""

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import (
    MLP,
    Config,
    decoder,
    grouped_attention,
    in_layer,
    number_of_experts,
    routed_experts,
    router,
)
from rftmega.converters.rules import Replicated, Rule

FIELDS = Fields(
    required=("num_experts_per_tok",),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "router_jitter_noise": 0.0},
    not_null=("num_local_experts", "num_experts"),
    rope_theta=5e6,
)


def table(config: Config) -> list[Rule]:
    experts = number_of_experts(config)
    bias = in_layer("block_sparse_moe.e_score_correction_bias", experts)
    mlp = [
        router(config, experts, "block_sparse_moe.gate.weight"),
        Replicated((MLP + "router.expert_bias",), (bias,)),
        *routed_experts(
            config,
            config["intermediate_size"],
            "block_sparse_moe.experts.{expert}.{projection}.weight",
            projections=("w1", "w3", "w2"),
        ),
    ]
    return decoder(config, grouped_attention(config, full_width_qk_norm=True), mlp)
