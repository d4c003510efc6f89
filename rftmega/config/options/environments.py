"""Options of the environment in which a task is done; and an environment that was made in Python."""

import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rftmega.config.options.bounds import Count, NotNegativeInt
from rftmega.config.options.parts import EnvironmentPart
from rftmega.config.options.tools import HTTPTool, MCPServer, SandboxTool, ToolLimits
from rftmega.core.errors import ConfigError


@dataclass(frozen=True)
class SingleTurn(EnvironmentPart):
    """The prompt, and one answer to it."""

    may_reward: ClassVar[bool] = False

    type: Literal["single_turn"] = "single_turn"


@dataclass(frozen=True)
class Tools(EnvironmentPart):
    """The model calls tools, turn by turn, until an answer calls none (docs/tools.md)."""

    type: Literal["tools"] = "tools"

    tools: list[str] = field(default_factory=list)
    """Python functions as tools, and classes whose methods are: [my_tools.py:search]."""

    sandbox: SandboxTool = field(default_factory=SandboxTool)

    http: list[HTTPTool] = field(default_factory=list)
    """Tools that web servers run, each with its options."""

    mcp: list[MCPServer] = field(default_factory=list)
    """Servers of the Model Context Protocol, each with its options."""

    limits: ToolLimits = field(default_factory=ToolLimits)

    max_turns: Count = 8
    """Answers that a rollout may have."""

    max_turn_tokens: NotNegativeInt = 0
    """Tokens that an answer may have; 0: as many as there is room for."""

    max_tokens: NotNegativeInt = 0
    """Tokens that all answers of a rollout may have together; 0: as many as there is room for."""

    over_limit: Literal["learn", "zero", "drop"] = "learn"
    """What becomes of a rollout that was cut off by a limit: it is scored and learnt from as it is,
    its reward is 0, or it is left out.
    """

    renderer: str = "auto"
    """How messages become tokens between turns: auto, template (the folder's chat template alone),
    or a renderer of the renderers library by name.
    """

    tool_parser: str = "auto"
    """Format of the calls in an answer, where no renderer of the library knows it."""


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
