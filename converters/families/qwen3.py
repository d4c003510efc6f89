"""Qwen3: RMSNorms of q and k in each head."""

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import Config, decoder, dense_mlp, grouped_attention
from rftmega.converters.rules import Rule

FIELDS = Fields(
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    nullable=("num_key_value_heads", "sliding_window"),
)


def table(config: Config) -> list[Rule]:
    return decoder(config, grouped_attention(config, qk_norm=True), dense_mlp(config))
