"""Qwen3.5's MoE models, text only: those of Qwen3-Next with other names, and MoE in every layer."""

from dataclasses import replace

from rftmega.converters import delta_net
from rftmega.converters.decoder import Config, decoder
from rftmega.converters.families import qwen2_moe, qwen3_next
from rftmega.converters.rules import Rule

FIELDS = replace(
    qwen3_next.FIELDS,
    without=("intermediate_size",),
    defaults={**delta_net.DEFAULTS, "num_key_value_heads": 2, "intermediate_size": 0},
    nullable=delta_net.FIELDS.nullable,
)
left_out = delta_net.left_out
written = delta_net.written


def table(config: Config) -> list[Rule]:
    return decoder(config, delta_net.mixed_attention(config), qwen2_moe.mixed_mlp(config))
