"""Mistral."""

from converters.decoder import Config, decoder, dense_mlp, grouped_attention
from converters.rules import Rule


def table(config: Config) -> list[Rule]:
    return decoder(config, grouped_attention(config), dense_mlp(config))
