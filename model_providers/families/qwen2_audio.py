"""Qwen2-Audio: Qwen2 with Whisper's audio encoder."""

from dataclasses import replace

from rftmega.converters.families import qwen2_audio
from rftmega.converters.llama_like import LLAMA_LIKE
from rftmega.converters.vision import count_of
from rftmega.model_providers import llama_like
from rftmega.model_providers.description import ModelDescription
from rftmega.model_providers.hf_config import HFConfig
from rftmega.model_providers.tower import read_audio_tower


def describe(config: HFConfig) -> ModelDescription:
    config.only("tie_word_embeddings", False, why="transformers' model has a head of its own")
    model = llama_like.describe(config, LLAMA_LIKE["qwen2"])
    parameters = count_of(qwen2_audio.shapes(config["audio_config"], model.hidden))
    return replace(model, tower=read_audio_tower(config, parameters=parameters))
