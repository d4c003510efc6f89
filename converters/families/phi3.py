"""Phi-3 and Phi-4: q, k and v are fused in one tensor, gate and up in another."""

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import Config, decoder, dense_mlp, grouped_attention
from rftmega.converters.rules import Rule

FIELDS = Fields(
    defaults={
        "num_key_value_heads": None,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
        "pad_token_id": 32000,
    },
    nullable=("num_key_value_heads", "sliding_window", "pad_token_id"),
    not_null=("head_dim", "partial_rotary_factor"),
)


def table(config: Config) -> list[Rule]:
    mlp = dense_mlp(config, projections=("gate_up_proj", "down_proj"))
    return decoder(config, grouped_attention(config, fused=True), mlp)
