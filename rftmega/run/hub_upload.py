"""Uploads the model that a run has trained to the Hugging Face hub."""

import logging
import sys

from rftmega.config import RunConfig
from rftmega.core.errors import ConfigError
from rftmega.models.hf.export_folder import MARK

log = logging.getLogger(__name__)


def claim(config: RunConfig) -> None:
    """Creates the repository that trainer.push_to_hub names, if it does not exist; called before
    training, so that problems show early.

    Raises ConfigError if the repository can't be created or written to.
    """
    repository = config.trainer.push_to_hub
    if not repository:
        return
    from huggingface_hub import auth_check, create_repo
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    said = f"trainer.push_to_hub={repository}"
    try:
        create_repo(repository, private=True, exist_ok=True)
        auth_check(repository, write=True)  # one that is there may be another's
    except OfflineModeIsEnabled as error:
        raise ConfigError(
            f"{said} needs a network, and HF_HUB_OFFLINE is set. Unset one."
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"{said}: the hub lets this account (HF_TOKEN) make no such repository, nor write to it: {error}"
        ) from error
    except Exception as error:  # the class of network errors changes between versions
        raise ConfigError(
            f"{said}: the hub can't be reached: {error}. Leave it out, and upload from elsewhere at the end:\n"
            f"    {_command(config)}"
        ) from error


def upload(config: RunConfig) -> None:
    """Uploads the exported model to the repository of trainer.push_to_hub, if set. A failure is only
    logged, with the command that repeats the upload, since the training itself has succeeded.
    """
    repository = config.trainer.push_to_hub
    if not repository:
        return
    from huggingface_hub import upload_folder

    try:
        found = upload_folder(
            repo_id=repository,
            folder_path=config.exported,
            ignore_patterns=[MARK],
            commit_message="Trained with rftmega",
        )
    except Exception as error:  # any error: the training itself has succeeded
        log.warning(
            "The model is not uploaded: %s. To do it again:\n    %s", error, _command(config)
        )
    else:
        sys.stdout.write(f"The model is at {found}\n")


def _command(config: RunConfig) -> str:
    return f"hf upload {config.trainer.push_to_hub} {config.exported} --exclude {MARK}"
