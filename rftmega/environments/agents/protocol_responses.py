"""OpenAI's Responses API, limited to text and function calls."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rftmega.data.chat.replies import Messages
from rftmega.environments.agents.protocol import (
    Asked,
    RequestRefused,
    Said,
    call_message,
    named,
    text_content,
)
from rftmega.environments.agents.request_shapes import (
    CallItem,
    FunctionTool,
    MessageItem,
    OutputItem,
    checked,
    refuse_unread,
)

ROLES = {"developer": "system"}


def asked_in_responses(body: Mapping[str, Any], before: Messages) -> Asked:
    """Returns the parsed Responses request `body`.

    `before`: if the request continues a previous response, the conversation's messages up to and
    including that response; otherwise empty. Raises RequestRefused for input items that are not
    text or function calls, and for tools that are not functions.
    """
    refuse_unread(body)
    if ((body.get("text") or {}).get("format") or {}).get("type", "text") != "text":
        raise RequestRefused("text.format can only be text: tokens are drawn without bounds.")
    given = body.get("input") or []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = body.get("instructions")
    # instructions apply to one request, not to those that continue it
    rest = before[1:] if instructions and before and before[0]["role"] == "system" else before
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += rest
    for item in items:
        _add(messages, item)
    if not messages:
        raise RequestRefused("input must not be empty.")
    tools = [_spec(each) for each in body.get("tools") or ()]
    return Asked(named(messages), tools, body.get("max_output_tokens"))


def _add(messages: Messages, item: Mapping[str, Any]) -> None:
    """Appends an input item of a Responses request to `messages` as a chat message; consecutive
    assistant items are joined to one message.
    """
    kind = item.get("type", "message")
    if kind == "reasoning":  # we return none, so it is another model's
        return
    if kind == "function_call_output":
        checked(OutputItem, item, "input")
        output = text_content(item["output"])
        reply = {"role": "tool", "content": output, "tool_call_id": item["call_id"]}
        messages.append(reply)
        return
    if kind not in ("message", "function_call"):
        raise RequestRefused(f"an item of type {kind!r}: give messages and calls of functions.")
    checked(MessageItem if kind == "message" else CallItem, item, "input")
    role = "assistant" if kind == "function_call" else ROLES.get(item["role"], item["role"])
    goes_on = role == "assistant" and messages and messages[-1]["role"] == "assistant"
    if not goes_on:
        messages.append({"role": role, "content": ""})
    last = messages[-1] = dict(messages[-1])
    if kind == "message":
        last["content"] += text_content(item["content"])
    else:
        call = call_message(item["call_id"], item["name"], item["arguments"])
        last["tool_calls"] = [*last.get("tool_calls", ()), call]


def _spec(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestRefused(f"a tool of type {tool.get('type')!r}: give functions.")
    checked(FunctionTool, tool, "tools")
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    return {"type": "function", "function": function | {"parameters": tool.get("parameters") or {}}}


def said_in_responses(body: Mapping[str, Any], said: Said, number: str) -> dict[str, Any]:
    """Returns the response body of a Responses request as a dictionary.

    `body`: the request; `said`: the model's response; `number`: a random text that makes the
    response's id unique.
    """
    cut = said.finish_reason == "length"
    prompt, completion = said.usage
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
    return _head(body, number) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(said, number),
        "usage": usage,
    }


def _head(body: Mapping[str, Any], number: str) -> dict[str, Any]:
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": str(body.get("model", "")),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
    }


def _output(said: Said, number: str) -> list[dict[str, Any]]:
    """Returns the output items of a response: its text, if there is any, followed by its function
    calls. `number` is part of the items' ids.
    """
    items: list[dict[str, Any]] = []
    calls = said.calls()
    if said.content or not calls:
        part = {"type": "output_text", "text": said.content, "annotations": []}
        message = {"type": "message", "id": f"msg_{number}", "role": "assistant"}
        items.append(message | {"status": "completed", "content": [part]})
    for call_id, name, arguments in calls:
        call = {"type": "function_call", "id": f"fc_{number}_{call_id}", "call_id": call_id}
        items.append(call | {"name": name, "arguments": arguments, "status": "completed"})
    return items


def events_in_responses(
    body: Mapping[str, Any], said: Said, number: str
) -> Iterator[dict[str, Any]]:
    """Yields the events of a streamed Responses response, each as a dictionary; the arguments are
    those of `said_in_responses`.
    """
    whole = said_in_responses(body, said, number)
    events = [{"type": "response.created", "response": _head(body, number)}]
    for index, item in enumerate(whole["output"]):
        events += _item_events(index, item)
    end = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
    events.append({"type": end, "response": whole})
    for sequence, event in enumerate(events):
        yield {**event, "sequence_number": sequence}


def _item_events(index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
    place = {"output_index": index, "item_id": item["id"]}
    empty: dict[str, Any] = (
        {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    )
    begun = item | empty | {"status": "in_progress"}
    events = [{"type": "response.output_item.added", "output_index": index, "item": begun}]
    if item["type"] == "function_call":
        written = item["arguments"]
        delta = {"type": "response.function_call_arguments.delta", "delta": written}
        done = {"type": "response.function_call_arguments.done", "arguments": written}
        events += [delta | place, done | place | {"name": item["name"]}]
    else:
        events += _text_events(place | {"content_index": 0}, item["content"][0])
    return [*events, {"type": "response.output_item.done", "output_index": index, "item": item}]


def _text_events(place: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    text = part["text"]
    return [
        {"type": "response.content_part.added", **place, "part": part | {"text": ""}},
        {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []},
        {"type": "response.output_text.done", **place, "text": text, "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
    ]
