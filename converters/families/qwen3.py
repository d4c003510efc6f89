"""Qwen3: an RMSNorm over each head of q and k."""

from converters.decoder import Config, decoder, dense_mlp, grouped_attention
from converters.rules import Rule


def table(config: Config) -> list[Rule]:
    return decoder(config, grouped_attention(config, qk_norm=True, head_dim=128), dense_mlp(config))
