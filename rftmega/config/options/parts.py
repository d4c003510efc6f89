"""Parts that an algorithm is put together from: a dataclass of options each, and the function that
does the part.

A part of a user's own is a dataclass and a function in a file that `plugins` names
(docs/algorithms.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Advantage:
    """Advantage estimators inherit from this.

    Their functions take (batch: Scored, options) and return a number an answer ([B]) or a token (Ragged).
    """

    needs_critic: ClassVar[bool] = False
    compares_group: ClassVar[bool] = False  # an answer without siblings has no advantage
    takes_kl: ClassVar[bool] = False  # reads the KL penalty of each token, `Scored.penalty`


@dataclass(frozen=True)
class PolicyLoss:
    """Policy losses inherit from this.

    Their functions take (log_ratio, advantage, mask, options) and return [B, T].
    """


@dataclass(frozen=True)
class ImportanceSampling:
    """Corrections of the engine's probabilities.

    Their functions take (log_ratio [B, T], options) and return weights [B, T].
    """


@dataclass(frozen=True)
class RewardPart:
    """Rewards of a user's own inherit from this.

    Their functions are called as those of reward.functions are, f(prompts, completions,
    **columns), with `options` among the keywords.
    """

    weight: Annotated[float, "any number"] = 0.0
    """Weight of this part in the reward; 0: it is not computed."""


@dataclass(frozen=True)
class EnvironmentPart:
    """Environments inherit from this.

    A class takes the part of the function: it is called with (options, tokenizer), and has a method
    `async def run(self, task, model)` that returns trajectories (`interfaces.Environment`).
    """

    may_reward: ClassVar[bool] = True  # it may give rewards of its own


KINDS: tuple[type, ...] = (
    Advantage,
    PolicyLoss,
    ImportanceSampling,
    RewardPart,
    EnvironmentPart,
)
IMPLEMENTATIONS: dict[type, Callable[..., Any]] = {}


def implements(options: type) -> Callable[[Function], Function]:
    """Registers the decorated function as the one that does the part whose options are `options`.

    Raises TypeError for a class that is no part, ValueError where the part has a function already.
    """
    if kind_of(options) is None:
        names = ", ".join(kind.__name__ for kind in KINDS)
        raise TypeError(
            f"{options.__name__} is no part of an algorithm: inherit from one of {names}."
        )
    if options in IMPLEMENTATIONS:
        raise ValueError(
            f"{options.__name__} has a function already: {IMPLEMENTATIONS[options].__name__}."
        )

    def register(function: Function) -> Function:
        IMPLEMENTATIONS[options] = function
        return function

    return register


def kind_of(options: type) -> type | None:
    """Returns which of KINDS a class of options belongs to; None for another class."""
    return next((kind for kind in KINDS if issubclass(options, kind) and options is not kind), None)


def type_of(options: type) -> str:
    """Returns the name that YAML selects a part by."""
    name: str = getattr(options, "type", "")
    return name
