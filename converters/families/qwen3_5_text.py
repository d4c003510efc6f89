"""Qwen3.5, text only: three of four layers have a gated delta net, the others attention whose
output is gated.
"""

from rftmega.converters import delta_net
from rftmega.converters.decoder import Config, decoder, dense_mlp
from rftmega.converters.rules import Rule

FIELDS = delta_net.FIELDS
left_out = delta_net.left_out
written = delta_net.written


def table(config: Config) -> list[Rule]:
    return decoder(config, delta_net.mixed_attention(config), dense_mlp(config))
