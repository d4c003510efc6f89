"""Converts server replies to validated completions."""

import math

import numpy as np
from torch import Tensor

from rftmega.core import expert_routes
from rftmega.core.errors import EngineError, EngineFault
from rftmega.core.expert_routes import RoutedModel
from rftmega.rollout.requests.partial_completion import PartialCompletion
from rftmega.rollout.servers.protocol import weight_version
from rftmega.rollout.servers.protocol.completion_checks import (
    ANY_COMPLETION,
    CompletionLimits,
    WrongReply,
    checked,
    versions_of,
)
from rftmega.rollout.servers.vllm import protocol


class StaleReply(EngineFault):
    """StaleReply is raised for a completion that a server generated with weights of an earlier push
    or of another run.
    """


def answered(
    reply: protocol.ServerReply,
    routed: RoutedModel | None = None,
    context: int = 0,
    *,
    limits: CompletionLimits = ANY_COMPLETION,
    run: str = "",
) -> PartialCompletion:
    """Returns the validated completion in a server's reply, as a PartialCompletion. `routed`: the
    MoE model whose expert routes the reply must have; None: routes are ignored. `context`: number
    of tokens before the completion; `limits`: the limits of a valid completion; `run`: id of the
    run whose pushes the weights must come from.

    Raises StaleReply for tokens generated with weights that this run did not push; WrongReply for
    an invalid completion, or for routes that do not match the tokens.
    """
    ids, logprobs = checked(reply, limits)
    numbers = []
    for told, start, _ in reply.spans:
        number = weight_version.number_of(told, run)
        if number is None:
            raise StaleReply(
                f"A server answered under weights {told[:80]!r} from token {start} on, which this run has not brought."
            )
        numbers.append(number)
    versions = versions_of(reply.spans, numbers, len(ids))
    routes = None
    if routed is not None and ids:
        routes = _routes_of(reply, routed, context + len(ids) - 1)
    return PartialCompletion(ids, logprobs, versions, reply.reason, routes)


def _routes_of(reply: protocol.ServerReply, routed: RoutedModel, fed: int) -> Tensor:
    """Returns the expert routes in a reply, [fed, MoE layers, experts per token]. `routed`: the
    numbers of MoE layers and experts; `fed`: number of tokens that the model processed. Raises
    WrongReply if the routes are missing or do not match.
    """
    size = math.prod(reply.shape)
    kind = np.dtype(np.uint8 if len(reply.routes) == size else np.int16)
    if min(reply.shape, default=0) < 0 or len(reply.routes) != size * kind.itemsize:
        raise WrongReply(
            f"A server gave {len(reply.routes)} bytes of routes of shape {reply.shape[:8]}."
        )
    told = np.frombuffer(reply.routes, kind).reshape(reply.shape) if reply.shape else None
    try:
        return expert_routes.of_vllm(told, routed, fed)
    except EngineError as error:
        raise WrongReply(str(error)) from error
