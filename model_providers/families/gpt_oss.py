"""gpt-oss: MoE in every layer, biases in all linear layers, and attention sinks."""

from dataclasses import replace

from rftmega.converters.decoder import number_of_experts
from rftmega.model_providers.description import (
    ClampedGate,
    Experts,
    ModelDescription,
    decoder,
    with_windows,
)
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    config.only("attention_bias", True, why="the layers are built with biases")
    model = decoder(config, qkv_bias=True, biased=True, packed=True)
    experts = Experts(
        number=number_of_experts(config),
        active=config["num_experts_per_tok"],
        ffn=model.ffn,
        layers=frozenset(range(model.layers)),
        normalised=True,
    )
    clamped = ClampedGate(config["swiglu_alpha"], config["swiglu_limit"])
    model = replace(model, experts=experts, clamped=clamped, sinks=True)
    return with_windows(model, config, used=True, listed=lambda layer: layer % 2 == 0)
