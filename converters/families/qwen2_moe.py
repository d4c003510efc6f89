"""Qwen2 MoE: MoE layers with a shared expert whose output is gated."""

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import (
    MLP,
    Config,
    decoder,
    dense_mlp,
    grouped_attention,
    in_layer,
    number_of_experts,
    qwen_sparse_layers,
    routed_experts,
    router,
    shared_expert,
)
from rftmega.converters.rules import Replicated, Rule

FIELDS = Fields(
    required=("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    defaults={
        "num_key_value_heads": 16,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
        "qkv_bias": True,
    },
    nullable=("sliding_window", "mlp_only_layers"),
    not_null=("head_dim", "num_experts"),
)


def table(config: Config) -> list[Rule]:
    attention = grouped_attention(config, qkv_bias=config["qkv_bias"])
    return decoder(config, attention, mixed_mlp(config))


def mixed_mlp(config: Config) -> list[Rule]:
    """Returns the conversion rules of dense MLPs, and in the other layers of experts with a shared
    expert whose output is gated.
    """
    sparse = qwen_sparse_layers(config)
    dense = frozenset(range(config["num_hidden_layers"])) - sparse
    gate = in_layer("mlp.shared_expert_gate.weight", 1, config["hidden_size"])
    return [
        *(dense_mlp(config, layers=dense) if dense else []),
        router(config, number_of_experts(config), layers=sparse),
        *routed_experts(config, config["moe_intermediate_size"], layers=sparse),
        *shared_expert(
            config, config["shared_expert_intermediate_size"], "mlp.shared_expert", layers=sparse
        ),
        Replicated((MLP + "shared_experts.gate_weight",), (gate,), layers=sparse),
    ]
