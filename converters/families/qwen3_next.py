"""Qwen3-Next: gated delta nets and gated attention as in Qwen3.5, and MoE layers with a shared
expert whose output is gated.
"""

from dataclasses import replace

from rftmega.converters import delta_net
from rftmega.converters.decoder import Config, decoder
from rftmega.converters.families import qwen2_moe
from rftmega.converters.rules import Rule

FIELDS = replace(
    delta_net.FIELDS,
    required=(
        *delta_net.FIELDS.required,
        *("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    ),
    defaults={
        **delta_net.DEFAULTS,
        "num_key_value_heads": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "norm_topk_prob": True,
    },
    nullable=(*delta_net.FIELDS.nullable, "mlp_only_layers"),
    not_null=("num_experts", "num_local_experts"),
)
left_out = delta_net.left_out
written = delta_net.written


def table(config: Config) -> list[Rule]:
    attention = delta_net.mixed_attention(config, grouped_by_head=True)
    return decoder(config, attention, qwen2_moe.mixed_mlp(config))
