"""Qwen3.5, text only: see `delta_net_decoder`."""

from rftmega.model_providers.delta_net import delta_net_decoder
from rftmega.model_providers.description import ModelDescription
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    return delta_net_decoder(config)
