"""Qwen2.5-VL: Qwen2 with a vision encoder that uses windowed attention."""

from dataclasses import replace

from rftmega.converters.families import qwen2_5_vl
from rftmega.converters.vision import count_of
from rftmega.model_providers.description import ModelDescription, decoder, qwen_windows
from rftmega.model_providers.hf_config import HFConfig
from rftmega.model_providers.tower import read_tower


def describe(config: HFConfig) -> ModelDescription:
    model = qwen_windows(decoder(config, qkv_bias=True), config)
    parameters = count_of(qwen2_5_vl.shapes(config["vision_config"]))
    tower = read_tower(config, width="hidden_size", ffn=None, gated=True, parameters=parameters)
    return replace(model, tower=tower)
