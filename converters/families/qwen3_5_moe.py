"""Qwen3.5's MoE models with their vision encoder.

A folder stores the matrices of all experts of a layer in two stacked tensors.
"""

from dataclasses import replace

from rftmega.converters import delta_net
from rftmega.converters.decoder import Config
from rftmega.converters.families import qwen3_5, qwen3_5_moe_text, qwen3_vl_moe
from rftmega.converters.rules import Rule

FIELDS = replace(qwen3_5.FIELDS, text=qwen3_5_moe_text.FIELDS)
left_out = delta_net.left_out
written = delta_net.written
stacks = qwen3_vl_moe.stacks


def table(config: Config) -> list[Rule]:
    qwen3_vl_moe.refuse_ambiguous(config["hidden_size"], config["moe_intermediate_size"])
    return qwen3_5.with_tower(qwen3_5_moe_text.table(config), config)
