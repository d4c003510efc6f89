"""Readers of chat messages in the published formats. Raise DataError for any other format.

The other modules use OpenAI's format, with the arguments of calls as dictionaries: {"role": ...,
"content": text or a list of parts, "reasoning_content": ..., "tool_calls": [...]}.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from rftmega.core.errors import DataError, shown
from rftmega.core.json_files import NotJSON, parse_json
from rftmega.data.chat.template_forms import REASONING_KEYS, Messages

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
CALL = "function_call"  # ShareGPT's speaker of a call; OpenAI's legacy field
SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    CALL: "assistant",
}


def no_roles() -> Collection[str]:
    """Returns an empty collection: the default for `roles`, with which messages may have only the
    roles in ROLES.
    """
    return ()


def chat_messages(
    value: Any, key: str, roles: Callable[[], Collection[str]] = no_roles
) -> Messages:
    """Returns the messages of a list in OpenAI's format; converts messages in ShareGPT's format.

    `roles` returns the roles that are permitted besides ROLES because the chat template names them.
    Raises DataError for an unknown role or empty content; the error names the message and `key`,
    the record's key of the list.
    """
    messages = []
    for number, given in enumerate(value):
        place = f'message {number} of "{key}"'
        try:
            messages.append(chat_message(given, roles))
        except DataError as error:
            raise DataError(f"{place} {error}") from error
    return messages


def chat_message(given: Any, roles: Callable[[], Collection[str]] = no_roles) -> dict[str, Any]:
    """Returns the message `given` in OpenAI's format. `roles` returns the permitted roles besides
    ROLES. Raises DataError for an invalid message; its text does not name the message, so callers
    add the name.
    """
    if not isinstance(given, Mapping):
        raise DataError(f'is {shown(given)}, not an object with "role" and "content".')
    # a table has each field of any message in all of them, as null
    message = {name: value for name, value in given.items() if value is not None}
    if "role" not in message and "from" in message:
        message = _of_sharegpt(message)
    if message.get("role") == "function":  # of OpenAI's legacy API
        message["role"] = "tool"
    role = message.get("role")
    if not isinstance(role, str) or role not in (*ROLES, *roles()):
        raise DataError(
            f"has the role {shown(role)}; known are {', '.join(ROLES)} and those that the chat template names. Rename it "
            '(ShareGPT\'s human and gpt belong under "from").'
        )
    if CALL in message:
        message["tool_calls"] = [message.pop(CALL)]
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = _calls(calls)
    message["content"] = _content(message, given)
    return message


def message_lists(value: Any) -> bool:
    """Returns whether `value` is a list whose first item has the keys of a chat message."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and bool({"role", "from"} & first.keys())


def parsed(value: Any) -> Any:
    """Returns the list of messages whose JSON text is `value`; returns any other value unchanged.

    CSV files, and some Parquet files, store messages as JSON text.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = parse_json(value)
    except NotJSON:
        return value
    return found if message_lists(found) else value


def tool_specs(value: Any, key: str) -> tuple[dict[str, Any], ...]:
    """Returns the function specs of a record in OpenAI's format. `value`: a list or its JSON text;
    `key`: the record's key of the value. Raises DataError for any other value.
    """
    try:
        found = parse_json(value) if isinstance(value, str) and value else value or []
    except NotJSON as error:
        raise DataError(f'"{key}" is {error}: {shown(value)}.') from error
    specs = [
        {"type": "function", "function": each}
        if isinstance(each, Mapping) and "name" in each and "function" not in each
        else each
        for each in (found if isinstance(found, list) else [found])
    ]
    for each in specs:
        function = each.get("function") if isinstance(each, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f'"{key}" holds {shown(each)}, which is no function with a name. Give specs as OpenAI\'s API has them, or set '
                "data.tools_key to a key that no record has."
            )
    return tuple(dict(each) for each in specs)


def _of_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    """Converts a message {"from": ..., "value": ...} to OpenAI's fields."""
    speaker, value = message.pop("from"), message.pop("value", None)
    if not isinstance(speaker, str) or speaker not in SHAREGPT:
        raise DataError(
            f"is from {shown(speaker)}; known are {', '.join(SHAREGPT)}. Rename the speaker."
        )
    if speaker == CALL:
        return {**message, "role": "assistant", "content": "", "tool_calls": _in_json(value)}
    return {**message, "role": SHAREGPT[speaker], "content": value}


def _in_json(value: Any) -> Any:
    """Returns the list of calls in a ShareGPT message, whose value is the JSON text of one call or
    of a list.
    """
    try:
        found = parse_json(value) if isinstance(value, str) else value
    except NotJSON as error:
        raise DataError(f"is a call whose text is {error}: {shown(value)}.") from error
    return found if isinstance(found, list) else [found]


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Returns the tool calls of a message, each with a name and a dictionary of arguments. Raises
    DataError for invalid calls.
    """
    if not isinstance(calls, list):
        raise DataError(f'has "tool_calls" {shown(calls)}, not a list.')
    return [_call(call, number) for number, call in enumerate(calls)]


def _call(given: Any, number: int) -> dict[str, Any]:
    call = dict(given) if isinstance(given, Mapping) else {}
    if "function" not in call and "name" in call:
        call["function"] = {name: call.pop(name) for name in ("name", "arguments") if name in call}
    function: Any = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"has a tool call without the name of a function: {shown(given)}.")
    call = {name: value for name, value in call.items() if value is not None}
    call.setdefault("type", "function")
    call.setdefault("id", f"call{number:05d}")  # nine characters: some templates require it
    return {**call, "function": {**function, "arguments": arguments(function.get("arguments"))}}


def arguments(given: Any) -> dict[str, Any]:
    """Returns the arguments of a call as a dictionary. OpenAI's API has them as JSON text.

    Raises DataError for arguments that are not a JSON object.
    """
    if given is None or given == "":
        return {}
    try:
        found = parse_json(given) if isinstance(given, str) else given
    except NotJSON as error:
        raise DataError(f"has a tool call whose arguments are {error}: {shown(given)}.") from error
    if not isinstance(found, Mapping):
        raise DataError(f"has a tool call whose arguments are no JSON object: {shown(given)}.")
    return dict(found)


def _content(message: Mapping[str, Any], given: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """Returns the content of a message: text, or a list of parts. Raises DataError if the content
    is empty, unless the message is a tool's or an assistant message with calls or reasoning.
    """
    acts = message["role"] == "assistant" and bool(
        message.get("tool_calls") or any(message.get(key) for key in REASONING_KEYS)
    )
    content = message.get("content")
    if content is None and acts:
        return ""
    if content is None:
        said = "null" if "content" in given or "value" in given else "missing"
        raise DataError(f"has no content: it is {said}. Leave the message out, or say something.")
    if isinstance(content, list):
        content = [_part(part) for part in content]
        blank = all(part["type"] == "text" and not part["text"].strip() for part in content)
    elif isinstance(content, str):
        blank = not content.strip()
    else:
        raise DataError(f"has the content {shown(content)}, neither text nor a list of parts.")
    if blank and not acts and message["role"] != "tool":
        raise DataError("has empty content. Leave the message out, or say something.")
    return content


def _part(given: Any) -> dict[str, Any]:
    """Returns a part of a message's content without null fields. Raises DataError for an invalid
    part.
    """
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
        raise DataError(f'has the part {shown(given)}, not an object with a "type".')
    part = {name: value for name, value in given.items() if value is not None}
    if part["type"] in TEXT_PARTS:
        part["type"] = "text"
        if not isinstance(part.get("text"), str):
            raise DataError(f'has the part {shown(given)}, whose "text" is no text.')
    return part
