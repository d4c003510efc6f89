"""GLM-4.5, 4.6 and 4.7: grouped-query attention with the MoE of DeepSeek-V3."""

from collections.abc import Set

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import Config, decoder, grouped_attention
from rftmega.converters.families import deepseek_v3
from rftmega.converters.rules import Rule

FIELDS = Fields(
    required=("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    defaults={
        "num_key_value_heads": 8,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    nullable=("partial_rotary_factor", "num_nextn_predict_layers"),
    not_null=("head_dim",),
)
written = deepseek_v3.written


def table(config: Config) -> list[Rule]:
    attention = grouped_attention(
        config, qkv_bias=config["attention_bias"], qk_norm=config["use_qk_norm"]
    )
    return decoder(config, attention, deepseek_v3.sigmoid_moe(config))


def left_out(config: Config, names: Set[str]) -> set[str]:
    """Returns the names among `names`, all tensors of a folder, that belong to multi-token
    prediction layers: these follow the last layer and are not loaded.
    """
    return deepseek_v3.predictors(config, names, table(config))
