"""Options of the environment in which a task is done; and an environment that was made in Python."""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

from rftmega.config.parts import EnvironmentPart
from rftmega.errors import ConfigError


@dataclass(frozen=True)
class SingleTurn(EnvironmentPart):
    """The prompt, and one answer to it."""

    type: Literal["single_turn"] = "single_turn"


@dataclass(frozen=True)
class GivenEnvironment(EnvironmentPart):
    """The environment that rftmega.train was given in Python."""

    type: Literal["python"] = "python"

    name: str = ""
    """Name of its class, as rftmega.train sets it."""


_given: dict[str, Any] = {}


def give_environment(environment: Any) -> str:
    """Makes an environment known to this process, in place of one before. Returns its name.

    `environment` has a method `async def run(self, task, model)`, or is a class of such objects,
    which is called with the run's tokenizer. Raises ConfigError for anything else.
    """
    _given.clear()
    if not inspect.iscoroutinefunction(getattr(environment, "run", None)):
        raise ConfigError(
            f"environment: {environment!r} has no method `async def run(self, task, model)` (docs/environments.md)."
        )
    kind = environment if isinstance(environment, type) else type(environment)
    _given[kind.__name__] = environment
    return kind.__name__


def environment_given(name: str) -> Any:
    """Returns the environment. Raises ConfigError where this process was given none of this name."""
    if name not in _given:
        raise ConfigError(
            f"environment: {name or 'an environment'} was given to rftmega.train in Python. Give it again, as environment=..."
        )
    return _given[name]
