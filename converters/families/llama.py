"""Llama 2 and 3."""

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import Config, decoder, dense_mlp, grouped_attention
from rftmega.converters.rules import Rule

FIELDS = Fields(
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
    nullable=("num_key_value_heads", "head_dim", "attention_dropout"),
)


def table(config: Config) -> list[Rule]:
    return decoder(config, grouped_attention(config), dense_mlp(config))
