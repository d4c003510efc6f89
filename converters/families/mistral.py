"""Mistral: the same tensors as Llama."""

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import Config, decoder, dense_mlp, grouped_attention
from rftmega.converters.rules import Rule

FIELDS = Fields(
    defaults={"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
    nullable=("head_dim", "sliding_window"),
)


def table(config: Config) -> list[Rule]:
    return decoder(config, grouped_attention(config), dense_mlp(config))
