"""Finds, before a run starts, problems that would show only at its end: folders that can't be
written, an invalid hub repository, a model card that can't be generated.

Problems of the model itself are found when the model is built: `placement.export.rehearse`.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rftmega.config import RunConfig
from rftmega.models.hf.export_folder import MARK, is_anothers
from rftmega.monitoring.model_card import model_card


def refusals(config: RunConfig) -> list[str]:
    """Returns a message for each reason why this run could not end successfully."""
    return [*_folders(config), *_exports(config), *_repository(config), *_card(config)]


def _folders(config: RunConfig) -> Iterator[str]:
    """Yields a message for each folder of the run that can't be written. Of a folder that does not
    exist yet, the nearest existing parent is tested.
    """
    written = {"trainer.output": config.trainer.output}
    if config.checkpoint.every and config.checkpoint.folder:
        written["checkpoint.folder"] = config.checkpoint.folder
    for option, folder in written.items():
        is_path = bool(folder.strip()) and "\0" not in folder
        if is_path and (reason := _unwritable(Path(folder).absolute())):
            yield f"{option}={folder} can't be written: {reason}. Choose another folder, or mend its permissions."


def _unwritable(folder: Path) -> str:
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        return f"{there} is no folder"
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"{there}: {error.strerror or error}"


def _exports(config: RunConfig) -> list[str]:
    """Returns a message for each folder that the run's export would replace, although no export
    wrote it.
    """
    folders = [Path(folder) for folder in config.exports()]
    folders += [folder.with_name(f"{folder.name}.incomplete") for folder in folders]
    return [
        f"{folder} is there, and no export made it (it has no {MARK}): the model could not go there. Move it away, choose "
        "another trainer.output, or set trainer.export=false."
        for folder in folders
        if is_anothers(folder)
    ]


def _repository(config: RunConfig) -> list[str]:
    """Returns a message if the hub's library rejects the name of the repository, without a request
    to the hub (`hub_upload.claim` sends one).
    """
    repository = config.trainer.push_to_hub
    if not repository:
        return []
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        return [f"trainer.push_to_hub={repository} is no name of a repository: {error}"]
    return []


def _card(config: RunConfig) -> list[str]:
    """Returns a message if the model card can't be generated, tested without any step."""
    if not config.trainer.export:
        return []
    try:
        model_card(config, [])
    except Exception as error:  # any error: otherwise it would be raised after the last step
        return [
            f"trainer.export=true: the model card can't be written: {type(error).__name__}: {error}. Set trainer.export=false."
        ]
    return []
