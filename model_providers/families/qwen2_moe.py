"""Qwen2-MoE: the weights of the active experts need not sum to 1, and there is one gated shared
expert.
Its sliding window, if enabled, applies to every second layer below `max_window_layers`, unlike in
the dense models.
"""

from dataclasses import replace

from rftmega.converters.decoder import number_of_experts, qwen_sparse_layers
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import Experts, ModelDescription, decoder, with_windows
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    experts = gated_experts(config, normalised=config["norm_topk_prob"])
    model = replace(decoder(config, qkv_bias=config["qkv_bias"]), experts=experts)
    used, last = config["use_sliding_window"], config["max_window_layers"]
    if used and not config.get("sliding_window"):
        raise CheckpointError(
            "use_sliding_window=true with sliding_window=null: give a window, or leave both out."
        )
    return with_windows(
        model, config, used=used, listed=lambda layer: layer % 2 == 0 and layer < last
    )


def gated_experts(config: HFConfig, *, normalised: bool) -> Experts:
    """Returns the description of experts with a shared expert whose output is gated; `normalised`:
    the weights of the active experts sum to 1.
    """
    return Experts(
        number=number_of_experts(config),
        active=config["num_experts_per_tok"],
        ffn=config["moe_intermediate_size"],
        layers=qwen_sparse_layers(config),
        normalised=normalised,
        shared_ffn=config["shared_expert_intermediate_size"],
        shared_gate=True,
    )
