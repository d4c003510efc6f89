"""Options of games of TextArena and of environments of OpenEnv."""

from dataclasses import dataclass
from typing import Literal

from rftmega.config.options.bounds import Count, NotNegativeInt, Positive
from rftmega.config.options.parts import EnvironmentPart


@dataclass(frozen=True)
class TextArena(EnvironmentPart):
    """A single-player game of the library TextArena, which data.train=textarena://GAME names, in a
    process with its own Python (docs/tasks.md).
    """

    type: Literal["textarena"] = "textarena"

    python: str = ""
    """Path of a virtual environment's Python, in which textarena is installed."""

    max_turns: Count = 20
    """Maximum number of completions (turns) per game; a game that is not over by then scores 0."""

    max_turn_tokens: NotNegativeInt = 0
    """Maximum tokens of one completion; 0: as many as fit, with the conversation so far, in
    rollout.max_prompt_tokens + max_response_tokens.
    """

    seconds: Positive = 60.0
    """Maximum seconds for one reply of a game; after that the rollout is started again."""

    start_seconds: Positive = 120.0
    """Maximum seconds for the process to load the library."""

    renderer: str = "auto"
    """Conversion of messages to tokens between turns, as environment.renderer of type tools: auto,
    template, or the name of a renderer.
    """


@dataclass(frozen=True)
class OpenEnv(EnvironmentPart):
    """An environment at a server of OpenEnv, which data.train=openenv://HOST:PORT names; its client
    has a process with its own Python (docs/tasks.md).
    """

    type: Literal["openenv"] = "openenv"

    python: str = ""
    """Path of a virtual environment's Python, in which openenv-core is installed."""

    action_key: str = "message"
    """Field of an action that holds the response without reasoning."""

    observation_key: str = ""
    """Field of an observation that the model is shown; empty: the whole observation as JSON."""

    max_turns: Count = 20
    """Maximum number of completions (turns) per rollout."""

    max_turn_tokens: NotNegativeInt = 0
    """Maximum tokens of one completion; 0: as many as fit, with the conversation so far, in
    rollout.max_prompt_tokens + max_response_tokens.
    """

    seconds: Positive = 60.0
    """Maximum seconds for one reply of the server; after that the rollout is started again."""

    start_seconds: Positive = 120.0
    """Maximum seconds for the process to load the library."""

    renderer: str = "auto"
    """Conversion of messages to tokens between turns, as environment.renderer of type tools: auto,
    template, or the name of a renderer.
    """
