"""Interfaces of tools, and the errors of tool calls.

A ToolError is a failure of the model: its text is returned to the model, and the rollout continues.
An InfrastructureFault (rftmega/core/errors.py) has a cause outside the rollout, which is run again.
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
    """A tool call that fails because of the model's request. The error's text is returned to the
    model.
    """


@dataclass(frozen=True)
class ToolSpec:
    """ToolSpec holds the description of a tool for the model, and the settings of the tool's calls."""

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
        """Returns the tool's spec in the format of OpenAI's API and chat templates."""
        told = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": told}

    def check(self, arguments: Any) -> dict[str, Any]:
        """Validates the arguments of a call and returns them. Raises ToolError, which names the
        mismatch, if the arguments do not match the schema.
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
    """ToolSession holds the state of a toolset's tools in one rollout."""

    async def ready(self) -> None:
        """Starts the server or process that a call needs. The time limit of a call does not include
        this.

        Raises InfrastructureFault if the start fails.
        """

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Runs a call of the tool `name` and returns the reply as text. `ready` must be called
        before.

        Raises ToolError if the model's request is at fault, InfrastructureFault for any other
        failure. The call is cancelled when it exceeds its time limit.
        """

    async def turn_reward(self) -> float | None:
        """Returns the reward of the turn whose calls have just run; None if the turn has no reward."""

    async def rewards(self) -> dict[str, float]:
        """Returns the rollout's reward components by name; called at the end of the rollout."""

    async def close(self) -> None:
        """Ends the session and all calls that are still running."""


class PlainSession:
    """PlainSession is a base class for sessions that need no rewards, startup or cleanup."""

    async def ready(self) -> None:
        """Does nothing: there is nothing to start."""

    async def turn_reward(self) -> float | None:
        return None

    async def rewards(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Does nothing: there is nothing to end."""


class Toolset(Protocol):
    """Toolset is the interface of a source of tools. All its methods except `session`, and the
    methods of its sessions, run in one event loop that runs continuously (background_loop.py).
    """

    stateful: bool  # calls of one rollout run one after another
    names: list[str]  # of its tools, as far as known before `open`

    async def open(self) -> Sequence[ToolSpec]:
        """Opens the toolset and returns the specs of its tools. May be called several times.

        Raises ConfigError for invalid options, InfrastructureFault if a server can't be reached.
        """

    def session(self, task: Prompt | None = None) -> ToolSession:
        """Creates the session for the rollout of a task; starts no server or process yet."""

    async def close(self) -> None:
        """Ends all servers, processes and connections that `open` and sessions started."""
