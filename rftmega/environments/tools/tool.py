"""Tools and their failures.

A ToolError is the model's failure: its text is returned to the model, and the rollout continues. An
InfrastructureFault (rftmega/core/errors.py) is not caused by the rollout, which is then run again.
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
    """A call that fails because of the model's request; its text is returned to the model."""


@dataclass(frozen=True)
class ToolSpec:
    """ToolSpec is the description of a tool for the model, with its call settings."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of the arguments, an object
    late_is_fault: bool = False  # a timeout is not the model's failure
    idempotent: bool = False  # a failed call may be repeated
    seconds: float = 0.0  # time limit of one call; 0: that of the limits

    def __post_init__(self) -> None:
        """Raises ConfigError if `parameters` is not the JSON schema of an object."""
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
        """Returns the tool in the format of OpenAI's API and chat templates."""
        told = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": told}

    def check(self, arguments: Any) -> dict[str, Any]:
        """Returns the arguments. Raises ToolError, naming the mismatch, if they do not fit the
        schema.
        """
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
        # an empty registry, so that a $ref to a URL is not fetched
        return Draft202012Validator(self.parameters, registry=Registry())


class ToolSession(Protocol):
    """ToolSession holds the tools' state of one rollout."""

    async def ready(self) -> None:
        """Starts what a call needs; the time is not counted as the call's.

        Raises InfrastructureFault if that fails.
        """

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Returns the reply. `ready` must be called before.

        Raises ToolError or InfrastructureFault. Is cancelled if it exceeds its time limit.
        """

    async def turn_reward(self) -> float | None:
        """Returns the reward of the turn whose calls just ran; None if there is none."""

    async def rewards(self) -> dict[str, float]:
        """Returns the rollout's reward components at its end, by name."""

    async def close(self) -> None:
        """Ends the session and all running work."""


class PlainSession:
    """PlainSession is the base of sessions without rewards, startup or cleanup."""

    async def ready(self) -> None:
        """Does nothing."""

    async def turn_reward(self) -> float | None:
        return None

    async def rewards(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Does nothing."""


class Toolset(Protocol):
    """Toolset is a source of tools. All its methods except `session`, and those of its sessions,
    run in one continuously running event loop (background_loop.py).
    """

    stateful: bool  # calls of one rollout run one after another
    names: list[str]  # of its tools, as far as known before `open`

    async def open(self) -> Sequence[ToolSpec]:
        """Returns its tools. May be called again.

        Raises ConfigError, or InfrastructureFault if a server can't be reached.
        """

    def session(self, task: Prompt | None = None) -> ToolSession:
        """Returns the session for the rollout of a task; opens nothing yet."""

    async def close(self) -> None:
        """Ends everything that `open` and sessions started."""
