"""Reads what servers answer."""

import math
from array import array

import numpy as np

from rftmega.columns import expert_routes
from rftmega.columns.expert_routes import RoutedModel
from rftmega.errors import EngineError, EngineFault
from rftmega.requests.partial_completion import PartialCompletion
from rftmega.vllm_server import wire


class StaleAnswer(EngineFault):
    """StaleAnswer is a server's that says that it has other weights than it was given."""


def answered(
    answer: wire.ServerAnswer, routed: RoutedModel | None = None, context: int = 0
) -> PartialCompletion:
    """Returns what a server has answered; with `routed` its routes, behind a context of so many
    tokens.

    Raises StaleAnswer for tokens of no push, EngineError for some without a version or a log-prob,
    and for routes that are not those of the tokens.
    """
    ids, logprobs = wire.numbers("i", answer.token_ids), wire.numbers("f", answer.logprobs)
    versions = array("i")
    for version, start, end in answer.spans:
        said = f"A server answered under weights {version!r} from token {start} on."
        if not version.isdecimal():
            raise StaleAnswer(said)
        if start != len(versions):
            raise EngineError(said)
        versions.extend([int(version)] * (end - start))
    if not len(ids) == len(logprobs) == len(versions):
        raise EngineError(
            f"A server gave {len(ids)} tokens, {len(logprobs)} log-probs and the versions of {len(versions)}."
        )
    routes = None
    if routed is not None and ids:
        small = len(answer.routes) == math.prod(answer.shape)
        told = np.frombuffer(answer.routes, np.uint8 if small else np.int16)
        if told.size == math.prod(answer.shape):
            told = told.reshape(answer.shape)
        routes = expert_routes.of_vllm(told, routed, context + len(ids) - 1)
    return PartialCompletion(ids, logprobs, versions, answer.reason, routes)
