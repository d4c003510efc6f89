"""Seed-OSS: Llama with a bias on q, k and v, and heads of their own width.

The published config.json tells the dropout that the model was trained with. Here `model.dropout`
says what a run drops.
"""

from rftmega.model_providers.description import ModelDescription, decoder
from rftmega.model_providers.hf_config import HFConfig

DROPOUT = 0.1  # of the published model


def describe(config: HFConfig) -> ModelDescription:
    config.only("residual_dropout", 0.0, DROPOUT, why="set model.dropout instead")
    config.only("attention_out_bias", False, why="o_proj is built without")
    return decoder(config, qkv_bias=config["attention_bias"], attention_dropout=DROPOUT)
