"""Describes decoders in which most layers have a gated delta net instead of attention."""

from dataclasses import replace

from rftmega.converters.delta_net import linear_layers
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import DeltaNet, ModelDescription, decoder
from rftmega.model_providers.hf_config import HFConfig

OF_IMAGES = ("mrope_section", "mrope_interleaved")  # without effect on positions of a text


def delta_net_decoder(config: HFConfig) -> ModelDescription:
    """Returns the description of a decoder whose layers have a gated delta net, or attention with a
    gated output; norms multiply by 1 + their weight, except those of the gated delta nets.

    Raises CheckpointError for numbers of heads that do not fit together.
    """
    config.get(
        "full_attention_interval"
    )  # read by linear_layers, unless layer_types has precedence
    config.get("layer_types")
    net = DeltaNet(
        layers=linear_layers(config),
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        convolved=config["linear_conv_kernel_dim"],
    )
    if net.value_heads % net.key_heads:
        raise CheckpointError(
            f"linear_num_value_heads={net.value_heads} is no multiple of linear_num_key_heads={net.key_heads}."
        )
    images = () if "vision_config" in config else OF_IMAGES
    model = decoder(config, qk_norm=True, partial_rope=True, rope_ignores=images)
    return replace(model, zero_centered=True, output_gate=True, delta_net=net)
