"""Construction of an environment from a run's options."""

from collections.abc import Sequence
from typing import Any

from rftmega.config.options.parts import IMPLEMENTATIONS, EnvironmentPart
from rftmega.core.interfaces import Environment
from rftmega.core.types import Prompt
from rftmega.environments import (  # noqa: F401  they register
    single_turn,
    text_games,
    tool_environment,
    user_environment,
)
from rftmega.environments.agents import agent, verifiers  # noqa: F401  they register


def specs_of(options: EnvironmentPart) -> list[dict[str, Any]]:
    """Returns the function specs of the environment's tools in OpenAI's format; an empty list for
    an environment without tools.

    The tokenizer's chat template presents the tools to the model, so the specs are needed before
    the tokenizer is created.
    """
    specs = getattr(IMPLEMENTATIONS[type(options)], "specs", None)
    found: list[dict[str, Any]] = specs(options) if specs else []
    return found


def check(environment: Environment, prompts: Sequence[Prompt]) -> None:
    """Raises DataError if the first of `prompts` is not a valid task of the environment. Checks
    nothing if the environment has no method `check`.
    """
    own = getattr(environment, "check", None)
    if own is not None and prompts:
        own(prompts[0])


def create(options: EnvironmentPart, tokenizer: Any) -> Environment:
    """Returns the environment that the options describe.

    `tokenizer` (data.Tokenizer) converts the environment's messages into token ids.
    """
    environment: Environment = IMPLEMENTATIONS[type(options)](options, tokenizer)
    return environment
