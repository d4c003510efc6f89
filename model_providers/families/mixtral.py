"""Mixtral: MoE in every layer; intermediate_size is the FFN size of one expert."""

from dataclasses import replace

from rftmega.converters.decoder import number_of_experts
from rftmega.model_providers.description import Experts, ModelDescription, decoder, everywhere
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    model = decoder(config)
    experts = Experts(
        number=number_of_experts(config),
        active=config["num_experts_per_tok"],
        ffn=model.ffn,
        layers=frozenset(range(model.layers)),
        normalised=True,  # as always in transformers' Mixtral
    )
    return everywhere(replace(model, experts=experts), config)
