"""Validation of agents' requests before they are processed, since an agent program may send any
data.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rftmega.environments.agents.protocol import RequestRefused

DEEPEST = 64  # nesting levels of lists and objects
WINDOWS = {"gzip": 31, "deflate": 15}  # window bits of zlib
SHOWN = 80  # characters of a value that an error quotes
Most = Annotated[int, Field(ge=1)] | None
Text = str | list[str | dict[str, Any]] | None  # content of a message: text or parts
# parameters that would change the sampling or the response, and are not supported
NOT_OFFERED = (
    *("seed", "stop", "logit_bias", "top_logprobs", "best_of", "use_beam_search", "length_penalty"),
    *("ignore_eos", "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
    *("structured_outputs", "logits_processors", "prompt_logprobs", "truncate_prompt_tokens"),
    *("echo", "suffix", "prediction", "audio", "functions", "function_call", "extra_args"),
    *("chat_template", "chat_template_kwargs", "documents", "continue_final_message"),
    *("vllm_xargs", "kv_transfer_params", "thinking_token_budget", "repetition_detection"),
)
# values that have no effect
NEUTRAL = {"best_of": 1, "length_penalty": 1}
# parameters of a token request that are accepted, since they don't affect the tokens
HARMLESS = (
    *("logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "output_kind", "flat_logprobs", "tool_choice"),
)


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True)


class _Function(_Shape):
    name: str
    arguments: str | dict[str, Any]


class _Call(_Shape):
    id: str
    function: _Function


class _Spec(_Shape):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(_Shape):
    type: Literal["function"] = "function"
    function: _Spec


class ChatMessage(_Shape):
    """ChatMessage is a message of a chat-completions request."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Format(_Shape):
    type: str = "text"


class _Head(_Shape):
    model: str | None = None
    stream: bool | None = None


class ChatRequest(_Head):
    """ChatRequest is the body of a chat-completions request."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[_Tool] | None = None
    max_tokens: Most = None
    max_completion_tokens: Most = None
    response_format: _Format | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None


class _TextOptions(_Shape):
    format: _Format | None = None


class ResponsesRequest(_Head):
    """ResponsesRequest is the body of a Responses request. Its input items are validated
    separately, by their type.
    """

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: Most = None
    text: _TextOptions | None = None


class MessageItem(_Shape):
    """MessageItem is a message among the items of a Responses request."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class CallItem(_Shape):
    """CallItem is a function call of the model among the items of a Responses request."""

    call_id: str
    name: str
    arguments: str | dict[str, Any]


class OutputItem(_Shape):
    """OutputItem is the output of a function call among the items of a Responses request."""

    call_id: str
    output: Text


class FunctionTool(_Spec):
    """FunctionTool is a function that a Responses request offers to the model."""

    type: Literal["function"]


class _TokenSampling(_Shape):
    max_tokens: Most = None


class TokenRequest(_Head):
    """TokenRequest is the body of a token request, in the format of vLLM's
    /inference/v1/generate.
    """

    token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    sampling_params: _TokenSampling | None = None
    stream: Literal[False] | None = None
    features: None = None  # of images


Shape = TypeVar("Shape", bound=BaseModel)


def checked(shape: type[Shape], given: Any, where: str = "") -> Shape:
    """Returns `given`, parsed JSON of a request, validated as an object of the class `shape`.

    `where`: its position in the request, for error messages. Raises RequestRefused that names the
    first invalid field.
    """
    try:
        return shape.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, ([where] if where else []) + list(first["loc"]))) or "the request"
        value = "" if first["type"] == "missing" else f", not {quoted(first['input'])}"
        raise RequestRefused(f"{name}: {first['msg']}{value}.") from None


def quoted(value: Any) -> str:
    """Returns the first SHOWN characters of a value's representation, for an error message."""
    text = ascii(value)
    return text[:SHOWN] + ("..." if len(text) > SHOWN else "")


def unpacked(content: bytes, encoding: str, most: int) -> bytes:
    """Returns the decompressed content of a request. `encoding`: its Content-Encoding; `most`:
    maximum number of bytes of the result.

    Raises RequestRefused for an unknown encoding, invalid content or too many bytes.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return content
    if encoding not in WINDOWS:
        raise RequestRefused(f"Content-Encoding {quoted(encoding)} is not gzip or deflate.")
    inner = zlib.decompressobj(WINDOWS[encoding])
    try:
        found = inner.decompress(content, most)
    except zlib.error as error:
        raise RequestRefused(f"the request is no {encoding}: {error}") from error
    if not inner.eof:
        raise RequestRefused(f"the request is cut off, or has more than {most} bytes unpacked.")
    return found


def body_of(content: bytes, charset: str | None) -> dict[str, Any]:
    """Parses a request's bytes as a JSON object; an empty request gives an empty dictionary.

    `charset`: the encoding that the request states; None: UTF-8. Raises RequestRefused for invalid
    text or JSON, a value that is not an object, non-finite numbers, invalid Unicode, or too deep
    nesting.
    """
    if not content.strip():
        return {}
    try:
        text = content.decode(charset or "utf-8")
        found = json.loads(text, parse_constant=_refused)
        if deeper(found, DEEPEST):
            raise RequestRefused(f"the request has more than {DEEPEST} levels.")
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    # unknown charset; invalid text; invalid JSON or a number of 5,000 digits; too deep nesting
    except (LookupError, ValueError, RecursionError) as error:
        raise RequestRefused(
            f"the request can't be read: {type(error).__name__}: {error}"
        ) from None
    if not isinstance(found, dict):
        raise RequestRefused(f"the request is no JSON object: {quoted(found)}.")
    return found


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def deeper(value: Any, most: int) -> bool:
    """Returns whether the lists and objects of a value are nested deeper than `most` levels."""
    level = [value]
    for _ in range(most + 1):
        nested = [each for each in level if isinstance(each, list | dict)]
        level = [
            item
            for each in nested
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, list | dict)
        ]
        if not level:
            return False
    return True


def refuse_unread(given: Mapping[str, Any], *, allowed: Mapping[str, Any] | None = None) -> None:
    """Raises RequestRefused if the request `given` sets a parameter that the endpoint does not
    support; the error names the parameter.

    `allowed`: parameter -> value that is accepted nevertheless, since it has no effect.
    """
    for name in NOT_OFFERED:
        value = given.get(name)
        silent = value is None or value == NEUTRAL.get(name)
        if name != "seed":  # 0 is a seed
            silent = silent or not value
        if not silent and (allowed or {}).get(name, object()) != value:
            raise RequestRefused(
                f"{name}={quoted(value)} is not offered by an endpoint of a training run: leave {name} out."
            )
