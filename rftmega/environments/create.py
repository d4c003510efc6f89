"""Builds an environment from a run's options."""

from typing import Any

from rftmega.config.parts import IMPLEMENTATIONS, EnvironmentPart
from rftmega.interfaces import Environment


def create(options: EnvironmentPart, tokenizer: Any) -> Environment:
    """Creates the environment whose options these are.

    `tokenizer` (data.Tokenizer) turns what the environment says into token ids.
    """
    environment: Environment = IMPLEMENTATIONS[type(options)](options, tokenizer)
    return environment
