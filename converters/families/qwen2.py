"""Qwen2 and 2.5: always a bias on q, k and v, which config.json does not mention."""

from converters.decoder import Config, decoder, dense_mlp, grouped_attention
from converters.rules import Rule


def table(config: Config) -> list[Rule]:
    return decoder(config, grouped_attention(config, qkv_bias=True), dense_mlp(config))
