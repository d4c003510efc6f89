"""Checks of options about pictures, against a model that sees or does not."""

from pathlib import Path

from rftmega.config.schema import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rftmega.errors import RFTMegaError
from rftmega.json_files import read_json_object


def vision(config: RunConfig) -> list[str]:
    """Lists what can't be; nothing where the model's config.json can't be read, which others tell."""
    try:
        fields = read_json_object(Path(config.model.path) / "config.json")
    except (OSError, RFTMegaError):
        return []
    tower = fields.get("vision_config")
    if not isinstance(tower, dict):
        return _without_tower(config)
    merge = tower.get("spatial_merge_size", 2)
    return _with_tower(config, merge if isinstance(merge, int) else 2)


def _without_tower(config: RunConfig) -> list[str]:
    found = []
    options = (
        ("model", config.model, ModelConfig, ("freeze_vision",)),
        ("optimizer", config.optimizer, OptimizerConfig, ("vision_learning_rate",)),
        ("critic.optimizer", config.critic.optimizer, OptimizerConfig, ("vision_learning_rate",)),
        ("rollout", config.rollout, RolloutConfig, ("max_pictures", "max_videos")),
        (
            "data",
            config.data,
            DataConfig,
            ("pictures_folder", "picture_hosts", "video_fps", "video_frames"),
        ),
        (
            "trainer",
            config.trainer,
            TrainerConfig,
            ("max_patches_per_micro_batch", "patch_weight"),
        ),
    )
    for section, chosen, defaults, names in options:
        for name in names:
            # a list's default is made anew for each config, and empty
            if (value := getattr(chosen, name)) != getattr(defaults, name, []):
                found.append(
                    f"{section}.{name}={value} needs a model with a vision tower; {config.model.path} has none. Leave it out."
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
    if config.model.dropout:
        found.append(
            f"model.dropout={config.model.dropout}: a vision tower has no dropout. Set it to 0."
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
    most = config.rollout.max_prompt_tokens * merge**2
    if 0 < (cap := config.trainer.max_patches_per_micro_batch) < most:
        found.append(
            f"trainer.max_patches_per_micro_batch={cap} may not hold a prompt of rollout.max_prompt_tokens="
            f"{config.rollout.max_prompt_tokens} tokens, up to {most} patches. Raise it, or set it to 0."
        )
    return found
