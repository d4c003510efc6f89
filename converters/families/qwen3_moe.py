"""Qwen3 with a mixture of experts in some or all layers."""

from converters.decoder import (
    Config,
    decoder,
    dense_mlp,
    grouped_attention,
    number_of_experts,
    qwen_sparse_layers,
    routed_experts,
    router,
)
from converters.rules import Rule


def table(config: Config) -> list[Rule]:
    sparse = qwen_sparse_layers(config)
    dense = frozenset(range(config["num_hidden_layers"])) - sparse
    mlp = [
        *dense_mlp(config, layers=dense),
        router(config, number_of_experts(config), layers=sparse),
        *routed_experts(config, config["moe_intermediate_size"], layers=sparse),
    ]
    return decoder(config, grouped_attention(config, qk_norm=True), mlp)
