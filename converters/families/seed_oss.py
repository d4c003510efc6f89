"""Seed-OSS: q, k and v have a bias unless config.json disables it."""

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import Config, decoder, dense_mlp, grouped_attention
from rftmega.converters.rules import Rule

FIELDS = Fields(
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "mlp_bias": False,
        "pad_token_id": 1,
    },
    nullable=("num_key_value_heads", "head_dim", "pad_token_id"),
)


def table(config: Config) -> list[Rule]:
    attention = grouped_attention(config, qkv_bias=config["attention_bias"])
    return decoder(config, attention, dense_mlp(config))
