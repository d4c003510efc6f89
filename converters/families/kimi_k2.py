"""Kimi-K2: the same tensors as DeepSeek-V3.

transformers has no defaults for Kimi-K2, so fields for which DeepSeek-V3 has defaults are required
here.
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
