"""Kimi-K2: DeepSeek-V3's tensors.

transformers has no defaults for it, so the fields with defaults for DeepSeek-V3 are required here.
"""

from dataclasses import replace

from rftmega.converters.families import deepseek_v3

NAMED = (
    *("num_key_value_heads", "q_lora_rank", "n_group", "topk_group", "n_shared_experts"),
    *("first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob"),
)
FIELDS = replace(deepseek_v3.FIELDS, required=(*deepseek_v3.FIELDS.required, *NAMED))
table = deepseek_v3.table
left_out = deepseek_v3.left_out
written = deepseek_v3.written
