"""Defines tools, and who is to blame where one fails.

A ToolError is the model's failure: it is told to the model, and the rollout goes on. An
InfrastructureFault (rftmega/core/errors.py) is nobody's in the rollout, which is then run again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry

from rftmega.core.errors import ConfigError, described
from rftmega.core.types import Prompt

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


class ToolError(Exception):
    """A call that fails by what the model asked for; its text is told to the model."""


@dataclass(frozen=True)
class ToolSpec:
    """ToolSpec is what the model is told of a tool, and how the tool may be called."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of the arguments, an object
    late_is_fault: bool = False  # a call that takes too long is not the model's failure
    idempotent: bool = False  # a failed call may be made again
    seconds: float = 0.0  # that one call may take; 0: as the limits say

    def __post_init__(self) -> None:
        """Raises ConfigError where `parameters` is no JSON schema of an object."""
        try:
            Draft202012Validator.check_schema(self.parameters)
        except SchemaError as error:
            raise ConfigError(
                f"The parameters of the tool {self.name} are no JSON schema: {error.message}."
            ) from error
        if self.parameters.get("type") != "object":
            raise ConfigError(
                f"The parameters of the tool {self.name} must be a JSON schema with type: object."
            )

    def openai(self) -> dict[str, Any]:
        """Returns the tool as the API of OpenAI, and chat templates, have it."""
        told = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": told}

    def check(self, arguments: Any) -> dict[str, Any]:
        """Returns the arguments. Raises ToolError that says how they do not fit the schema."""
        try:
            wrong = best_match(self._validator.iter_errors(arguments))
        except Exception as error:  # a number too large for the schema's arithmetic, a broken $ref
            raise ToolError(
                f"the arguments of {self.name} can't be compared with its schema: {described(error)}"
            ) from error
        if wrong is not None:
            where = "".join(f"[{step!r}]" for step in wrong.absolute_path)
            raise ToolError(f"wrong arguments of {self.name}: arguments{where}: {wrong.message}")
        checked: dict[str, Any] = arguments
        return checked

    @cached_property
    def _validator(self) -> Draft202012Validator:
        # without a registry of its own a $ref to an address would be fetched
        return Draft202012Validator(self.parameters, registry=Registry())


class ToolSession(Protocol):
    """ToolSession holds what tools keep of one rollout."""

    async def ready(self) -> None:
        """Starts what a call needs, in a time of its own: it does not count as the call's.

        Raises InfrastructureFault.
        """

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Returns the reply. `ready` comes before.

        Raises ToolError or InfrastructureFault. May be cancelled where it takes too long.
        """

    async def turn_reward(self) -> float | None:
        """Returns what the answer is worth whose calls were just made; None: it is not known."""

    async def rewards(self) -> dict[str, float]:
        """Returns what the rollout is worth at its end, in named parts."""

    async def close(self) -> None:
        """Ends it, whatever is still running."""


class PlainSession:
    """PlainSession is the part of a session that gives no rewards, and has nothing to start and to
    end.
    """

    async def ready(self) -> None:
        """Does nothing."""

    async def turn_reward(self) -> float | None:
        return None

    async def rewards(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Does nothing."""


class Toolset(Protocol):
    """Toolset is a source of tools. All its methods but `session` run in one event loop that never
    stands still (background_loop.py), those of its sessions as well.
    """

    stateful: bool  # calls of one rollout come one after another
    names: list[str]  # of its tools, as far as they are known before `open`

    async def open(self) -> Sequence[ToolSpec]:
        """Returns its tools. May be called again.

        Raises ConfigError, or InfrastructureFault where a server can't be reached.
        """

    def session(self, task: Prompt | None = None) -> ToolSession:
        """Returns what the rollout of a task calls; opens nothing yet."""

    async def close(self) -> None:
        """Ends what `open` and sessions began."""
