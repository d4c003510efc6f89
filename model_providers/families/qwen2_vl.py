"""Qwen2-VL: Qwen2 with a vision encoder."""

from dataclasses import replace

from rftmega.converters.families import qwen2_vl
from rftmega.converters.vision import count_of
from rftmega.model_providers.description import ModelDescription, decoder, qwen_windows
from rftmega.model_providers.hf_config import HFConfig
from rftmega.model_providers.tower import read_tower


def describe(config: HFConfig) -> ModelDescription:
    model = qwen_windows(decoder(config, qkv_bias=True), config)
    fields = config["vision_config"]
    ffn = fields["embed_dim"] * fields["mlp_ratio"]
    parameters = count_of(qwen2_vl.shapes(fields))
    tower = read_tower(config, width="embed_dim", ffn=ffn, gated=False, parameters=parameters)
    return replace(model, tower=tower)
