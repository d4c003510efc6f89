"""Mixtral: MoE in every layer; an expert's w1, w3 and w2 are the gate, up and down projections."""

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import (
    Config,
    decoder,
    grouped_attention,
    number_of_experts,
    routed_experts,
    router,
)
from rftmega.converters.rules import Rule

FIELDS = Fields(
    required=("num_experts_per_tok",),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    },
    nullable=("head_dim", "sliding_window"),
    not_null=("num_local_experts", "num_experts"),
    rope_theta=1e6,
)


def table(config: Config) -> list[Rule]:
    experts = "block_sparse_moe.experts.{expert}.{projection}.weight"
    mlp = [
        router(config, number_of_experts(config), "block_sparse_moe.gate.weight"),
        *routed_experts(
            config, config["intermediate_size"], experts, projections=("w1", "w3", "w2")
        ),
    ]
    return decoder(config, grouped_attention(config), mlp)
