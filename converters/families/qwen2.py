"""Qwen2 and Qwen2.5: q, k and v always have a bias, which config.json does not mention."""

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import Config, decoder, dense_mlp, grouped_attention
from rftmega.converters.rules import Rule

FIELDS = Fields(
    defaults={
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    nullable=("num_key_value_heads", "sliding_window"),
    not_null=("head_dim",),
)


def table(config: Config) -> list[Rule]:
    return decoder(config, grouped_attention(config, qkv_bias=True), dense_mlp(config))
