"""Checks of options for images, videos and waveforms: whether the model supports them and they fit
each other.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rftmega.config.capabilities import engine_of
from rftmega.config.schema import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rftmega.core.errors import RFTMegaError
from rftmega.core.json_files import read_json_object

VLLM_POSITIONS = 1500
Options = Mapping[str, tuple[type, tuple[str, ...]]]
TOWER_RATE = (OptimizerConfig, ("vision_learning_rate",))
VIDEOS: Options = {
    "rollout": (RolloutConfig, ("max_videos",)),
    "data": (DataConfig, ("video_fps", "video_frames")),
}
TOWERS: Options = {
    "model": (ModelConfig, ("freeze_vision",)),
    "optimizer": TOWER_RATE,
    "critic.optimizer": TOWER_RATE,
    "rollout": (RolloutConfig, ("max_images", "max_videos")),
    "data": (DataConfig, ("media_folder", "media_hosts", "video_fps", "video_frames")),
    "trainer": (TrainerConfig, ("max_patches_per_micro_batch",)),
}


def vision(config: RunConfig) -> list[str]:
    """Returns the problems of options for images, videos and waveforms; an empty list if the
    model's config.json cannot be read, which other checks report.
    """
    try:
        fields = read_json_object(Path(config.model.path) / "config.json")
    except (OSError, RFTMegaError):
        return []
    audio = fields.get("audio_config")
    if isinstance(audio, dict):
        positions = audio.get("max_source_positions", 1500)
        return _with_audio(config, positions if isinstance(positions, int) else 1500)
    tower = fields.get("vision_config")
    if not isinstance(tower, dict):
        return _without(config, TOWERS, "a model with a tower that sees or hears")
    if config.rollout.addresses or config.rollout.server_list:
        return [
            "rollout.addresses and rollout.server_list: images reach servers of this host alone so far. Leave both out, "
            "or take a model without a tower."
        ]
    merge = tower.get("spatial_merge_size", 2)
    return _with_tower(config, merge if isinstance(merge, int) else 2)


def _without(config: RunConfig, options: Options, needed: str) -> list[str]:
    """Returns a problem for each of `options` that is set although the model lacks the modality
    that the option needs; `needed`: the kind of model to name in the message.
    """
    found = []
    for section, (defaults, names) in options.items():
        chosen: Any = config
        for part in section.split("."):
            chosen = getattr(chosen, part)
        for name in names:
            # a list's default is an empty list, created for each config
            if (value := getattr(chosen, name)) != getattr(defaults, name, []):
                found.append(
                    f"{section}.{name}={value} needs {needed}; {config.model.path} is none. Leave it out."
                )
    return found


def _with_audio(config: RunConfig, positions: int) -> list[str]:
    """Returns the conflicts of options with an audio-language model; `positions`: number of
    positions of a waveform in the audio encoder.
    """
    found = _without(config, VIDEOS, "a model that sees")
    found += _of_tower(config)
    if config.strategy == "separate" and config.rollout.max_images:
        found.append(
            "strategy=separate: servers are asked without waveforms so far. Set rollout.max_images=0 for prompts of words "
            "alone, or strategy=colocated."
        )
    if engine_of(config.rollout).vllm_kernels and positions != VLLM_POSITIONS:
        found.append(
            f"rollout.engine=vllm: vLLM takes windows of {VLLM_POSITIONS} positions (30 s), and the model's "
            f"max_source_positions is {positions}. Set rollout.engine=transformers."
        )
    most = config.rollout.max_images * positions * config.given_rows
    if 0 < (cap := config.trainer.max_patches_per_micro_batch) < most:
        found.append(
            f"trainer.max_patches_per_micro_batch={cap} may not hold a prompt of rollout.max_images="
            f"{config.rollout.max_images} waveforms, {positions} positions each. Raise it, lower rollout.max_images, or set "
            "it to 0."
        )
    return found


def _with_tower(config: RunConfig, merge: int) -> list[str]:
    found = []
    if not config.rollout.max_videos:
        for name in ("video_fps", "video_frames"):
            if (value := getattr(config.data, name)) != getattr(DataConfig, name):
                found.append(
                    f"data.{name}={value} is read where prompts may have videos. Set rollout.max_videos, or leave it out."
                )
    found += _of_tower(config)
    most = config.rollout.max_prompt_tokens * merge**2 * config.given_rows
    if 0 < (cap := config.trainer.max_patches_per_micro_batch) < most:
        found.append(
            f"trainer.max_patches_per_micro_batch={cap} may not hold a prompt of rollout.max_prompt_tokens="
            f"{config.rollout.max_prompt_tokens} tokens, up to {most} patches. Raise it, or set it to 0."
        )
    return found


def _of_tower(config: RunConfig) -> list[str]:
    """Returns the conflicts of options for models with a vision or audio encoder."""
    found = []
    if config.model.dropout:
        found.append(
            f"model.dropout={config.model.dropout}: the tower has no dropout. Set it to 0."
        )
    rate = config.optimizer.vision_learning_rate
    if rate and config.model.freeze_vision:
        found.append(
            f"optimizer.vision_learning_rate={rate}: with model.freeze_vision=true the tower does not learn. Leave one out."
        )
    if rate and not config.optimizer.learning_rate:
        found.append(
            f"optimizer.vision_learning_rate={rate} needs optimizer.learning_rate above 0, of whose schedule it is a share."
        )
    return found
