"""Mixtral: w1, w3 and w2 are gate, up and down."""

from converters.decoder import Config, decoder, grouped_attention, number_of_experts, routed_experts, router
from converters.rules import Rule


def table(config: Config) -> list[Rule]:
    experts = "block_sparse_moe.experts.{expert}.{projection}.weight"
    mlp = [
        router(config, number_of_experts(config), "block_sparse_moe.gate.weight"),
        *routed_experts(config, config["intermediate_size"], experts, projections=("w1", "w3", "w2")),
    ]
    return decoder(config, grouped_attention(config), mlp)
