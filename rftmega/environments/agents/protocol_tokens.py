"""Parsing of requests whose context is token ids, in the format of vLLM's /inference/v1/generate."""

from collections.abc import Mapping
from typing import Any

from rftmega.core.types import Sampling
from rftmega.data.chat.renderer import ConversationRenderer
from rftmega.environments.agents.protocol import NEUTRAL, RequestRefused, Tokens
from rftmega.environments.agents.request_shapes import (
    HARMLESS,
    NOT_OFFERED,
    TokenRequest,
    checked,
    quoted,
    refuse_unread,
)

READ = ("max_tokens", *Sampling._fields, *NEUTRAL)


def asked_in_tokens(body: Mapping[str, Any], renderer: ConversationRenderer) -> Tokens:
    """Returns the parsed token request `body`.

    `renderer` knows the vocabulary and the run's stop tokens. Raises RequestRefused for ids outside
    the vocabulary and for unsupported parameters.
    """
    request = checked(TokenRequest, body)
    known = renderer.tokenizer.size
    for number in request.token_ids:
        if number >= known:
            raise RequestRefused(f"token_ids: {quoted(number)} is none of the {known} tokens.")
    params = body.get("sampling_params") or {}
    refuse_unread(body)
    refuse_unread(params, allowed={"stop_token_ids": _ends(params, renderer)})
    if strangers := [each for each in params if each not in (*READ, *HARMLESS, *NOT_OFFERED)]:
        raise RequestRefused(f"sampling_params.{quoted(strangers[0])} is not known: leave it out.")
    most = request.sampling_params.max_tokens if request.sampling_params else None
    return Tokens(tuple(request.token_ids), most)


def _ends(params: Mapping[str, Any], renderer: ConversationRenderer) -> Any:
    """Returns the request's stop_token_ids if each of them is a stop token of this run anyway, so
    that they have no effect; None otherwise. `params`: the request's sampling parameters.
    """
    given = params.get("stop_token_ids")
    ends = {*renderer.ends, *renderer.tokenizer.stop_ids}
    own = isinstance(given, list) and all(type(each) is int and each in ends for each in given)
    return given if own else None
