"""Qwen3 MoE: Qwen3 with MoE in some or all layers."""

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import (
    Config,
    decoder,
    dense_mlp,
    grouped_attention,
    number_of_experts,
    qwen_sparse_layers,
    routed_experts,
    router,
)
from rftmega.converters.rules import Rule

FIELDS = Fields(
    required=("num_experts_per_tok", "moe_intermediate_size"),
    defaults={
        "num_key_value_heads": 4,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
    },
    nullable=("sliding_window", "mlp_only_layers"),
    not_null=("head_dim", "num_experts", "num_local_experts"),
)


def table(config: Config) -> list[Rule]:
    sparse = qwen_sparse_layers(config)
    dense = frozenset(range(config["num_hidden_layers"])) - sparse
    mlp = [
        *dense_mlp(config, layers=dense),
        router(config, number_of_experts(config), layers=sparse),
        *routed_experts(config, config["moe_intermediate_size"], layers=sparse),
    ]
    return decoder(config, grouped_attention(config, qk_norm=True), mlp)
