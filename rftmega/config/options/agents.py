"""Options of agents that bring a loop of their own, and of environments of other libraries."""

from dataclasses import dataclass, field
from typing import Literal

from rftmega.config.options.bounds import Positive
from rftmega.config.options.parts import EnvironmentPart
from rftmega.config.options.secrecy import SecretCommand, SecretOptions


@dataclass(frozen=True)
class Agent(EnvironmentPart):
    """A program of yours does the task, and asks the model by OpenAI's API (docs/agents.md)."""

    type: Literal["agent"] = "agent"

    function: str = ""
    """Function that does a task, as FILE.py:FUNCTION or MODULE:FUNCTION: solve(task, base_url,
    api_key, model), which may be `async`. It returns a reward, rewards by name, or None.
    """

    command: SecretCommand = field(default_factory=list)
    """Program that does a task, in place of a function. It finds OPENAI_BASE_URL, OPENAI_API_KEY,
    OPENAI_MODEL and TASK (JSON) in its environment; its last line may be rewards as JSON.
    """

    seconds: Positive = 600.0
    """Seconds that one rollout may take; what there is then is scored."""

    agent_errors: Literal["raise", "score"] = "raise"
    """What becomes of a rollout whose agent failed: the run ends, or what there is of it is scored,
    without rewards of the agent's.
    """

    renderer: str = "auto"
    """How messages become tokens between turns, as for type: tools."""

    tool_parser: str = "auto"
    """Format of the calls in an answer, as for type: tools."""


@dataclass(frozen=True)
class Verifiers(EnvironmentPart):
    """An environment of the verifiers library, in a process with its own Python (docs/agents.md)."""

    type: Literal["verifiers"] = "verifiers"

    environment: str = ""
    """Name of the environment: its taskset, as `verifiers` finds it."""

    options: SecretOptions = field(default_factory=dict)
    """Options of the environment, as its configuration has them; no value is stored."""

    python: str = ""
    """Python of a virtual environment that has `requirements/verifiers.txt` and the environment."""

    seconds: Positive = 600.0
    """Seconds that one rollout may take; it is given up then, and begun anew."""

    start_seconds: Positive = 120.0
    """Seconds that the process may take to load the environment."""

    renderer: str = "auto"
    """How messages become tokens between turns, as for type: tools."""

    tool_parser: str = "auto"
    """Format of the calls in an answer, as for type: tools."""
