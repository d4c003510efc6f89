"""Components of an algorithm: each is a dataclass of options and the function that implements it.

A user-defined component is a dataclass and a function in a file that `plugins` names
(docs/algorithms.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Advantage:
    """Base class of the options of advantage estimators.

    An implementation takes (batch: Scored, options) and returns one number per completion ([R]) or
    per token (Ragged).
    """

    needs_critic: ClassVar[bool] = False
    compares_group: ClassVar[bool] = False  # a completion alone in its group has no advantage
    takes_kl: ClassVar[bool] = False  # reads the KL penalty of each token, `Scored.penalty`
    needs_parts: ClassVar[bool] = False  # reads the components of the reward, `Scored.parts`


@dataclass(frozen=True)
class PolicyLoss:
    """Base class of the options of policy losses.

    An implementation takes (log_ratio, advantage, mask, options) and returns the loss of each
    token, [B, T]. With `needs_log_probs` it takes two more, both [B, T] and 0 outside the mask:
    `logp`, the current log-probs, and `sampling_logp`, those under which the engine sampled.
    """

    needs_log_probs: ClassVar[bool] = False


@dataclass(frozen=True)
class ImportanceSampling:
    """Base class of the options of importance-sampling corrections.

    An implementation takes (log_ratio [B, T], options) and returns weights [B, T].
    """


@dataclass(frozen=True)
class RewardPart:
    """Base class of the options of user-defined reward components.

    An implementation is called like a function in reward.functions, f(prompts, completions,
    **columns), with `options` as an additional keyword.
    """

    weight: Annotated[float, "any number"] = 0.0
    """Weight of this component in the reward; 0: it is not computed."""


@dataclass(frozen=True)
class EnvironmentPart:
    """Base class of the options of environments.

    An implementation is a class instead of a function: the class is called with (options,
    tokenizer), and its objects have a method `async def run(self, task, model)` that returns
    trajectories (`interfaces.Environment`).
    """

    may_reward: ClassVar[bool] = True  # whether the environment itself may return rewards


KINDS: tuple[type, ...] = (
    Advantage,
    PolicyLoss,
    ImportanceSampling,
    RewardPart,
    EnvironmentPart,
)
IMPLEMENTATIONS: dict[type, Callable[..., Any]] = {}


def implements(options: type) -> Callable[[Function], Function]:
    """Returns a decorator that registers a function as the implementation of a component;
    `options`: the component's dataclass of options.

    Raises TypeError for a class that is not a component, and ValueError if the component already
    has an implementation.
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
    """Returns the base class among KINDS of an options dataclass; None for any other class."""
    return next((kind for kind in KINDS if issubclass(options, kind) and options is not kind), None)


def type_of(options: type) -> str:
    """Returns the name by which a config selects a component (its `type`); "" if the class has
    none.
    """
    name: str = getattr(options, "type", "")
    return name
