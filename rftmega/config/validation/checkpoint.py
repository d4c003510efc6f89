"""Checks of checkpoint options."""

from dataclasses import fields
from pathlib import Path

from rftmega.config.schema import CheckpointConfig, RunConfig

OF_RESUMES = ("every", "resume")


def checkpoints(config: RunConfig) -> list[str]:
    """Returns the problems of checkpoint options: options without effect because nothing is saved,
    and a missing folder to resume from.
    """
    chosen, found = config.checkpoint, []
    if not chosen.every:
        found += [
            f"checkpoint.{option.name}={value} needs checkpoint.every above 0: nothing is saved."
            for option in fields(chosen)
            if option.name not in OF_RESUMES
            if (value := getattr(chosen, option.name)) != getattr(CheckpointConfig(), option.name)
        ]
    if chosen.resume not in ("auto", "none") and not Path(chosen.resume).is_dir():
        found.append(
            f"checkpoint.resume={chosen.resume} is not a folder. Give a checkpoint, or auto, or none."
        )
    return found
