"""OLMo 2: norms follow attention and MLP, and the q and k norms span all heads."""

from dataclasses import replace

from rftmega.model_providers.description import ModelDescription, decoder
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    return replace(decoder(config, qk_norm=True), full_width_qk_norm=True, post_norm=True)
