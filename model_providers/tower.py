"""Describes vision and audio encoders, which map images or waveforms to features for the decoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rftmega.model_providers.hf_config import HFConfig

TOKENS = ("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")


@dataclass(frozen=True)
class VisionTower:
    """VisionTower holds the sizes of a vision encoder; `fields` is config.json's vision_config,
    completed with defaults.
    """

    depth: int
    width: int
    ffn: int
    heads: int
    gated: bool  # its MLPs are gated
    patch_size: int
    temporal_patch_size: int
    merge: int  # patches along each side that are merged into one feature
    channels: int
    image_token: int  # placeholder of one feature
    window: int  # pixels along each side of an attention window; 0: full attention
    full_layers: int  # layers with full attention
    deepstack: int  # decoder layers that get features of their own
    parameters: int
    fields: Mapping[str, Any]

    @property
    def patch_width(self) -> int:
        """Returns the number of values in a patch of pixels: channels * frames * height * width."""
        return self.channels * self.temporal_patch_size * self.patch_size**2


def read_tower(
    config: HFConfig, *, width: str, ffn: int | None, gated: bool, parameters: int
) -> VisionTower:
    """Returns the description of a vision encoder, read from `vision_config` in config.json.

    `width`: name of the field with the encoder's hidden size; `ffn`: its FFN size, None to read
    intermediate_size; `gated`: its MLPs are gated; `parameters`: its number of parameters.
    """
    fields = config["vision_config"]
    for name in TOKENS:  # unused here
        config.get(name)
    full = fields.get("fullatt_block_indexes")
    return VisionTower(
        depth=fields["depth"],
        width=fields[width],
        ffn=fields["intermediate_size"] if ffn is None else ffn,
        heads=fields["num_heads"],
        gated=gated,
        patch_size=fields["patch_size"],
        temporal_patch_size=fields["temporal_patch_size"],
        merge=fields["spatial_merge_size"],
        channels=fields["in_channels"],
        image_token=config["image_token_id"],
        window=fields.get("window_size", 0),
        full_layers=fields["depth"] if full is None else len(set(full)),
        deepstack=len(fields.get("deepstack_visual_indexes", ())),
        parameters=parameters,
        fields=fields,
    )


@dataclass(frozen=True)
class AudioTower:
    """AudioTower holds the sizes of an audio encoder; `fields` is config.json's audio_config,
    completed with defaults.
    """

    depth: int
    width: int
    ffn: int
    heads: int
    channels: int  # mel bands of a frame
    positions: int  # sequence length of its layers, however long a waveform is
    audio_token: int  # placeholder of one feature, which covers two positions
    parameters: int
    fields: Mapping[str, Any]
    deepstack: int = 0  # decoder layers that get features of their own
    gated: bool = False  # its MLPs are gated


def read_audio_tower(config: HFConfig, *, parameters: int) -> AudioTower:
    """Returns the description of an audio encoder, read from `audio_config` in config.json;
    `parameters` is the encoder's number of parameters.
    """
    fields = config["audio_config"]
    config.get("audio_token_id")
    config.get("ignore_index")  # of a loss that is not used
    return AudioTower(
        depth=fields["encoder_layers"],
        width=fields["d_model"],
        ffn=fields["encoder_ffn_dim"],
        heads=fields["encoder_attention_heads"],
        channels=fields["num_mel_bins"],
        positions=fields["max_source_positions"],
        audio_token=config["audio_token_index"],
        parameters=parameters,
        fields=fields,
    )
