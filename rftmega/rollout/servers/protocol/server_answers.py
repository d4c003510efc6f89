"""Reads what servers answer."""

import math

import numpy as np
from torch import Tensor

from rftmega.core import expert_routes
from rftmega.core.errors import EngineError, EngineFault
from rftmega.core.expert_routes import RoutedModel
from rftmega.rollout.requests.partial_completion import PartialCompletion
from rftmega.rollout.servers.protocol import weight_version
from rftmega.rollout.servers.protocol.completion_checks import (
    ANY_ANSWER,
    AnswerLimits,
    WrongAnswer,
    checked,
    versions_of,
)
from rftmega.rollout.servers.vllm import protocol


class StaleAnswer(EngineFault):
    """StaleAnswer is a server's that says that it has other weights than it was given."""


def answered(
    answer: protocol.ServerAnswer,
    routed: RoutedModel | None = None,
    context: int = 0,
    *,
    limits: AnswerLimits = ANY_ANSWER,
    run: str = "",
) -> PartialCompletion:
    """Returns what a server has answered; with `routed` its routes, behind a context of so many
    tokens. `run`: whose pushes its weights are of.

    Raises StaleAnswer for tokens of no push of the run, WrongAnswer for what is no answer to such a
    request, and for routes that are not those of the tokens.
    """
    ids, logprobs = checked(answer, limits)
    numbers = []
    for told, start, _ in answer.spans:
        number = weight_version.number_of(told, run)
        if number is None:
            raise StaleAnswer(
                f"A server answered under weights {told[:80]!r} from token {start} on, which this run has not brought."
            )
        numbers.append(number)
    versions = versions_of(answer.spans, numbers, len(ids))
    routes = None
    if routed is not None and ids:
        routes = _routes_of(answer, routed, context + len(ids) - 1)
    return PartialCompletion(ids, logprobs, versions, answer.reason, routes)


def _routes_of(answer: protocol.ServerAnswer, routed: RoutedModel, fed: int) -> Tensor:
    """Returns the routes of so many tokens. Raises WrongAnswer where there are none, or others."""
    size = math.prod(answer.shape)
    kind = np.dtype(np.uint8 if len(answer.routes) == size else np.int16)
    if min(answer.shape, default=0) < 0 or len(answer.routes) != size * kind.itemsize:
        raise WrongAnswer(
            f"A server gave {len(answer.routes)} bytes of routes of shape {answer.shape[:8]}."
        )
    told = np.frombuffer(answer.routes, kind).reshape(answer.shape) if answer.shape else None
    try:
        return expert_routes.of_vllm(told, routed, fed)
    except EngineError as error:
        raise WrongAnswer(str(error)) from error
