"""Parses the JSON completions of stock vLLM and SGLang servers."""

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from rftmega.core.errors import EngineFault
from rftmega.rollout.servers.vllm import protocol

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Kind = TypeVar("Kind")


class WeightSpan(msgspec.Struct):
    """WeightSpan is a range of a completion's tokens, from `start` up to `end` (exclusive), that
    were generated with one version of the weights.
    """

    version: str
    start: int
    end: int


class TokenLogprob(msgspec.Struct):
    """TokenLogprob is the log-prob of one sampled token in vLLM's reply."""

    logprob: float


class Logprobs(msgspec.Struct):
    """Logprobs holds the log-probs of all sampled tokens in vLLM's reply."""

    content: list[TokenLogprob] | None = None


class Choice(msgspec.Struct):
    """Choice is one completion in vLLM's reply."""

    token_ids: list[TokenId]
    finish_reason: str
    logprobs: Logprobs | None = None
    weight_versions: list[WeightSpan] | None = None

    @property
    def reply(self) -> protocol.ServerReply:
        content = (self.logprobs and self.logprobs.content) or []
        values = [each.logprob for each in content]
        return _reply(self.token_ids, values, self.finish_reason, self.weight_versions)


class GenerateReply(msgspec.Struct):
    """GenerateReply is vLLM's reply to a request for one completion."""

    choices: Annotated[list[Choice], msgspec.Meta(min_length=1, max_length=1)]
    prompt_token_ids: list[TokenId] | None = None

    @property
    def reply(self) -> protocol.ServerReply:
        return self.choices[0].reply


class SGLangToken(msgspec.Struct, array_like=True):
    """SGLangToken is a sampled token in SGLang's JSON reply, an array of log-prob, token id and
    sometimes the token's text.
    """

    logprob: float
    token: TokenId


class SGLangEnd(msgspec.Struct):
    """SGLangEnd is the finish reason of an SGLang completion."""

    type: str


class SGLangMeta(msgspec.Struct):
    """SGLangMeta holds the fields of meta_info in SGLang's reply that this project uses."""

    finish_reason: SGLangEnd
    output_token_logprobs: list[SGLangToken] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    weight_versions: list[WeightSpan] | None = None


class SGLangReply(msgspec.Struct):
    """SGLangReply is SGLang's reply to a request for one completion."""

    meta_info: SGLangMeta


def reply_of(reply: Any) -> GenerateReply:
    """Parses vLLM's JSON reply to a completion request. Raises EngineFault if it is invalid."""
    return _converted(reply, GenerateReply)


def of_vllm(choice: Any) -> protocol.ServerReply:
    """Converts one choice (completion) of vLLM's JSON reply. Raises EngineFault if it is wrong."""
    return _converted(choice, Choice).reply


def of_sglang(reply: Any) -> protocol.ServerReply:
    """Converts SGLang's JSON reply to a completion request.

    Raises EngineFault if it is no valid reply, or has tokens without weight versions.
    """
    told = _converted(reply, SGLangReply).meta_info
    tokens = told.output_token_logprobs or []
    ids = [each.token for each in tokens]
    values = told.output_token_sampling_logprobs or [each.logprob for each in tokens]
    if ids and not told.weight_versions:
        raise EngineFault(
            "An SGLang server answered without meta_info.weight_versions, and nobody knows which weights gave its tokens."
        )
    return _reply(ids, values, told.finish_reason.type, told.weight_versions)


def _reply(
    ids: Sequence[int], logprobs: Sequence[float], reason: str, spans: Sequence[WeightSpan] | None
) -> protocol.ServerReply:
    told = [(span.version, span.start, span.end) for span in spans or ()]
    return protocol.ServerReply(
        0, protocol.integers(ids), array("f", logprobs).tobytes(), reason, told
    )


def _converted(found: Any, kind: type[Kind]) -> Kind:
    try:
        return msgspec.convert(found, kind)
    except (msgspec.ValidationError, ValueError) as error:  # including invalid text
        raise EngineFault(f"A server's reply is no completion: {error}.") from error
