"""Seed-OSS: Llama with a bias on q, k and v, and an explicit head_dim."""

from rftmega.model_providers.description import ModelDescription, decoder
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    config.only("attention_out_bias", False, why="o_proj is built without")
    return decoder(config, qkv_bias=config["attention_bias"])
