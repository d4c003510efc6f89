"""Builds an environment from a run's options."""

from collections.abc import Sequence
from typing import Any

from rftmega.config.options.parts import IMPLEMENTATIONS, EnvironmentPart
from rftmega.core.interfaces import Environment
from rftmega.core.types import Prompt


def specs_of(options: EnvironmentPart) -> list[dict[str, Any]]:
    """Returns the tools that the environment offers, as OpenAI's API has them; none of most.

    The chat template tells the model of them, so they come before the tokenizer.
    """
    specs = getattr(IMPLEMENTATIONS[type(options)], "specs", None)
    found: list[dict[str, Any]] = specs(options) if specs else []
    return found


def check(environment: Environment, prompts: Sequence[Prompt]) -> None:
    """Raises DataError for tasks that the environment can't do, as far as the first one tells."""
    own = getattr(environment, "check", None)
    if own is not None and prompts:
        own(prompts[0])


def create(options: EnvironmentPart, tokenizer: Any) -> Environment:
    """Creates the environment whose options these are.

    `tokenizer` (data.Tokenizer) turns what the environment says into token ids.
    """
    environment: Environment = IMPLEMENTATIONS[type(options)](options, tokenizer)
    return environment
