"""OpenAI's Chat Completions API: parsing of requests and building of responses."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rftmega.environments.agents.protocol import (
    Asked,
    RequestRefused,
    Said,
    call_message,
    named,
    text_content,
)
from rftmega.environments.agents.request_shapes import ChatRequest, checked, refuse_unread

ROLES = {"developer": "system", "function": "tool"}


def asked_in_chat(body: Mapping[str, Any]) -> Asked:
    """Returns a parsed Chat Completions request. Raises RequestRefused if the request is invalid or
    has non-text content.
    """
    checked(ChatRequest, body)
    refuse_unread(body)
    messages = body["messages"]
    if (body.get("response_format") or {"type": "text"}).get("type") != "text":
        raise RequestRefused("response_format can only be text: tokens are drawn without bounds.")
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    tools = [{"type": "function", "function": each["function"]} for each in body.get("tools") or ()]
    return Asked(named([_message(each) for each in messages]), tools, most)


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    role = ROLES.get(given["role"], given["role"])
    message: dict[str, Any] = {"role": role, "content": text_content(given.get("content"))}
    for key in ("tool_call_id", "name", "reasoning_content"):
        if given.get(key):
            message[key] = given[key]
    if calls := given.get("tool_calls"):
        functions = [(call["id"], call["function"]) for call in calls]
        message["tool_calls"] = [
            call_message(call_id, function["name"], function["arguments"])
            for call_id, function in functions
        ]
    return message


def said_in_chat(body: Mapping[str, Any], said: Said, number: str) -> dict[str, Any]:
    """Returns the response body of a Chat Completions request as a dictionary.

    `body`: the request; `said`: the model's response; `number`: a random text that makes the
    response's id unique.
    """
    message: dict[str, Any] = {"role": "assistant", "content": said.content or None}
    if said.reply.reasoning:
        message["reasoning_content"] = said.reply.reasoning
    if calls := said.calls():
        message["tool_calls"] = [_call(*each) for each in calls]
    choice = {"index": 0, "message": message, "finish_reason": said.finish_reason}
    if body.get("logprobs"):
        choice["logprobs"] = {"content": _logprobs(said)}
    head = _head(body, number, "chat.completion")
    return {**head, "choices": [choice], "usage": _usage(said)}


def chunks_in_chat(body: Mapping[str, Any], said: Said, number: str) -> Iterator[dict[str, Any]]:
    """Yields the chunks of a streamed Chat Completions response, each as a dictionary; the
    arguments are those of `said_in_chat`.
    """
    head = _head(body, number, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        if finish is None and "content" in delta and body.get("logprobs"):
            choice["logprobs"] = {"content": _logprobs(said)}
        return {**head, "choices": [choice]}

    first: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reply.reasoning:
        first["reasoning_content"] = said.reply.reasoning
    yield chunk(first)
    for index, each in enumerate(said.calls()):
        yield chunk({"tool_calls": [{"index": index, **_call(*each)}]})
    yield chunk({}, said.finish_reason)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": _usage(said)}


def _head(body: Mapping[str, Any], number: str, kind: str) -> dict[str, Any]:
    model = str(body.get("model", ""))
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": model}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _usage(said: Said) -> dict[str, int]:
    prompt, completion = said.usage
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _logprobs(said: Said) -> list[dict[str, Any]]:
    """Returns the log-prob of each token in OpenAI's format. Log-probs are 0 if the engine returned
    none.
    """
    values = said.completion.logprobs or [0.0] * len(said.pieces)
    return [
        {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, value in zip(said.pieces, values, strict=True)
    ]
