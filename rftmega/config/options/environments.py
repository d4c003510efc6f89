"""Options of the environment that runs rollouts, and registration of an environment given in
Python.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rftmega.config.options.bounds import Count, NotNegativeInt
from rftmega.config.options.parts import EnvironmentPart
from rftmega.config.options.tools import HTTPTool, MCPServer, SandboxTool, ToolLimits
from rftmega.core.errors import ConfigError


@dataclass(frozen=True)
class SingleTurn(EnvironmentPart):
    """Single-turn: the prompt and one completion."""

    may_reward: ClassVar[bool] = False

    type: Literal["single_turn"] = "single_turn"


@dataclass(frozen=True)
class Tools(EnvironmentPart):
    """Multi-turn tool use: the model calls tools, turn by turn, until a completion calls none
    (docs/tools.md).
    """

    type: Literal["tools"] = "tools"

    tools: list[str] = field(default_factory=list)
    """Python functions as tools, and classes whose methods are tools: [my_tools.py:search]."""

    sandbox: SandboxTool = field(default_factory=SandboxTool)

    http: list[HTTPTool] = field(default_factory=list)
    """Tools on web servers, each with its options."""

    mcp: list[MCPServer] = field(default_factory=list)
    """Servers of the Model Context Protocol (MCP), each with its options."""

    limits: ToolLimits = field(default_factory=ToolLimits)

    max_turns: Count = 8
    """Maximum number of completions (turns) per rollout."""

    max_turn_tokens: NotNegativeInt = 0
    """Maximum tokens of one completion; 0: as many as fit, with the conversation so far, in
    rollout.max_prompt_tokens + max_response_tokens.
    """

    max_tokens: NotNegativeInt = 0
    """Maximum tokens of all completions of a rollout together, without the environment's messages;
    0: as many as fit, with prompt and messages, in rollout.max_prompt_tokens + max_response_tokens.
    """

    over_limit: Literal["learn", "zero", "drop"] = "learn"
    """Rollouts cut off by a limit. learn: scored and trained on as they are; zero: their reward is
    0; drop: left out.
    """

    renderer: str = "auto"
    """Conversion of messages to tokens between turns: auto, template (the folder's chat template
    alone), or the name of a renderer of the renderers library.
    """

    tool_parser: str = "auto"
    """Format of tool calls in a completion, if no renderer of the library is used: auto (from the
    chat template), hermes, mistral, llama-3, gpt-oss, deepseek-v3, glm or qwen3.5.
    """


@dataclass(frozen=True)
class GivenEnvironment(EnvironmentPart):
    """The environment passed to rftmega.train in Python."""

    type: Literal["python"] = "python"

    name: str = ""
    """Name of the environment's class; rftmega.train sets it."""


_given: dict[str, Any] = {}


def give_environment(environment: Any) -> str:
    """Registers an environment in this process, replacing an earlier one, and returns its class's
    name.

    `environment` has a method `async def run(self, task, model)`, or is a class whose objects have
    this method; the class is called with the run's tokenizer. Raises ConfigError for anything else.
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
    """Returns the environment registered under this name. Raises ConfigError if there is none."""
    if name not in _given:
        raise ConfigError(
            f"environment: {name or 'an environment'} was given to rftmega.train in Python. Give it again, as environment=..."
        )
    return _given[name]
