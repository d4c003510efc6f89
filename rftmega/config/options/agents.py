"""Options of agents with their own loop, and of environments of the verifiers library."""

from dataclasses import dataclass, field
from typing import Literal

from rftmega.config.options.bounds import Positive
from rftmega.config.options.parts import EnvironmentPart
from rftmega.config.options.secrecy import SecretCommand, SecretOptions


@dataclass(frozen=True)
class Agent(EnvironmentPart):
    """An agent: a program of yours that does the task and calls the model through OpenAI's API
    (docs/agents.md).
    """

    type: Literal["agent"] = "agent"

    function: str = ""
    """Function that does a task, as FILE.py:FUNCTION or MODULE:FUNCTION: solve(task, base_url,
    api_key, model), which may be `async`. It returns a reward, rewards by name, or None.
    """

    command: SecretCommand = field(default_factory=list)
    """Program that does a task, instead of a function. It gets OPENAI_BASE_URL, OPENAI_API_KEY,
    OPENAI_MODEL and TASK (JSON) in its environment; its last line of output may be rewards as JSON.
    """

    seconds: Positive = 600.0
    """Maximum seconds of one rollout; after that its completions so far are scored."""

    agent_errors: Literal["raise", "score"] = "raise"
    """Rollouts whose agent failed: end the run, or score the completions so far, without rewards of
    the agent.
    """

    renderer: str = "auto"
    """Conversion of messages to tokens between turns, as environment.renderer of type tools: auto,
    template, or the name of a renderer.
    """

    tool_parser: str = "auto"
    """Format of tool calls in a completion, as environment.tool_parser of type tools: auto, or the
    name of a parser.
    """


@dataclass(frozen=True)
class Verifiers(EnvironmentPart):
    """An environment of the verifiers library, in a process with its own Python (docs/agents.md)."""

    type: Literal["verifiers"] = "verifiers"

    environment: str = ""
    """Name of the environment: its taskset, as known to `verifiers`."""

    options: SecretOptions = field(default_factory=dict)
    """Options of the environment, as in its configuration; their values are not stored."""

    python: str = ""
    """Path of a virtual environment's Python, in which requirements/verifiers.txt and the
    environment are installed.
    """

    seconds: Positive = 600.0
    """Maximum seconds of one rollout; after that it is cancelled and started again."""

    start_seconds: Positive = 120.0
    """Maximum seconds for the process to load the environment."""

    renderer: str = "auto"
    """Conversion of messages to tokens between turns, as environment.renderer of type tools: auto,
    template, or the name of a renderer.
    """

    tool_parser: str = "auto"
    """Format of tool calls in a completion, as environment.tool_parser of type tools: auto, or the
    name of a parser.
    """
