"""Qwen3-VL: Qwen3 with a vision encoder whose features also enter the first decoder layers
(DeepStack).
"""

from dataclasses import replace

from rftmega.converters.families import qwen3_vl
from rftmega.converters.vision import count_of
from rftmega.model_providers.description import ModelDescription, decoder
from rftmega.model_providers.hf_config import HFConfig
from rftmega.model_providers.tower import VisionTower, read_tower


def describe(config: HFConfig) -> ModelDescription:
    return replace(decoder(config, qk_norm=True), tower=tower_of(config))


def tower_of(config: HFConfig) -> VisionTower:
    """Returns the description of Qwen3-VL's vision encoder."""
    parameters = count_of(qwen3_vl.shapes(config["vision_config"]))
    return read_tower(config, width="hidden_size", ffn=None, gated=False, parameters=parameters)
