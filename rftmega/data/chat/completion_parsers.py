"""Parsers of function calls and reasoning in completions, for the formats of the supported models."""

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rftmega.core.errors import ConfigError
from rftmega.data.chat.replies import ChatTokenizer, text_of, token_id

THINK, UNTHINK = "<think>", "</think>"
HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
HARMONY = ("<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>")
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE = "```"
ANALYSIS = re.compile(
    r"<\|channel\|>analysis[^<]*<\|message\|>(.*?)(?:<\|end\|>|(?=<\|start\|>)|\Z)", re.DOTALL
)
LLAMA_CALL = re.compile(r'\{\s*"(?:name|parameters|type"\s*:\s*"function)"')
NEAR = 8  # tokens at the end of a context that may contain an opening think tag
DEEPEST = 100  # nesting levels of lists and objects in the arguments of a call
UNREADABLE = (
    400  # brackets within each other, at which no parser of JSON is asked: it would recurse
)
BRACKET = re.compile(r"[\[{\]}]")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """SampledCompletion holds the token ids of a completion, without the stop token that ended it,
    and `context`, the token ids before the completion.
    """

    context: Sequence[int]
    token_ids: Sequence[int]
    ended: bool = True  # by a stop token


@dataclass(frozen=True, slots=True)
class Call:
    """Call is a function call as the model wrote it; `arguments` is None if they could not be
    parsed, `id` is empty unless the model wrote one.
    """

    name: str
    arguments: dict[str, Any] | None
    text: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """Parsed is a completion split into content, reasoning and function calls. `text` is its whole
    text, `spoken` the text before the first call, reasoning included.
    """

    content: str
    reasoning: str
    calls: tuple[Call, ...]
    spoken: str  # text up to the first call, reasoning included
    text: str  # the whole text, special tokens by their names


Parser = Callable[[ChatTokenizer, SampledCompletion], Parsed]


def call_of(fields: Any, text: str) -> Call:
    """Returns the function call that the parsed JSON value `fields` describes; `text`: the call as
    the model wrote it. The returned Call has no name and no arguments if `fields` has no valid
    name.
    """
    name = fields.get("name") if isinstance(fields, dict) else None
    if not isinstance(name, str) or not _writable([name]):
        return Call("", None, text)
    arguments = fields.get("arguments", fields.get("parameters", {}))
    return Call(name, object_of(arguments), text)


def object_of(value: Any) -> dict[str, Any] | None:
    """Returns a value as a dictionary if it is a JSON object or the text of one; None otherwise.

    Also returns None for an object with non-finite numbers, invalid Unicode, numbers of more digits
    than Python reads or very deep nesting, which no tool or chat template could process.
    """
    if isinstance(value, str):
        value = _json(value)
    return value if isinstance(value, dict) and _writable(value) else None


def _writable(value: Any) -> bool:
    """Returns whether a value can be written as JSON in UTF-8, nested at most DEEPEST levels."""
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            return False
        lists = [each.values() if isinstance(each, dict) else each for each in level]
        inside = [each for values in lists for each in values]
        level, depth = [each for each in inside if isinstance(each, dict | list)], depth + 1
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError):
        return False
    return True


def too_deep(text: str) -> bool:
    """Returns whether brackets in a text are nested more than UNREADABLE levels deep. Such a text
    must not be parsed: Python's JSON parser would reach the recursion limit, at which even
    destructors fail.
    """
    depth = 0
    for bracket in BRACKET.finditer(text):
        depth = depth + 1 if bracket[0] in "[{" else max(0, depth - 1)
        if depth > UNREADABLE:
            return True
    return False


def _json(text: str) -> Any:
    """Returns the parsed JSON value of a text; None for invalid JSON."""
    if too_deep(text):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _thought(tokenizer: ChatTokenizer, context: Sequence[int], text: str) -> tuple[str, str]:
    """Splits a completion's text and returns (reasoning, rest): the reasoning at its beginning, and
    the text after the reasoning. `context`: the tokens before the completion, which may already
    open the reasoning.
    """
    begun = text_of(tokenizer, context[-NEAR:]).rstrip().endswith(THINK)
    if not begun and not text.lstrip().startswith(THINK):
        return "", text
    inside, _, behind = text.removeprefix(" ").lstrip("\n").removeprefix(THINK).partition(UNTHINK)
    return inside.strip("\n"), behind.lstrip("\n")


def hermes(tokenizer: ChatTokenizer, completion: SampledCompletion) -> Parsed:
    """Parses the calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>`.
    """
    text = text_of(tokenizer, completion.token_ids)
    reasoning, behind = _thought(tokenizer, completion.context, text)
    found = list(HERMES.finditer(behind))
    calls = []
    for match in found:
        fields = _json(match[1]) if match[2] else None
        calls.append(call_of(fields, match[0]))
    if not found:
        return Parsed(behind, reasoning, (), text, text)
    before = len(text) - len(behind) + found[0].start()
    content = behind[: found[0].start()].rstrip("\n")
    spoken = text[:before].rstrip("\n")
    return Parsed(content, reasoning, tuple(calls), spoken, text)


def mistral(tokenizer: ChatTokenizer, completion: SampledCompletion) -> Parsed:
    """Parses the calls of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or
    `[TOOL_CALLS]name[ARGS]{...}`.
    """
    text = text_of(tokenizer, completion.token_ids)
    content, *written = text.split(MISTRAL)
    calls: list[Call] = []
    for each in written:
        name, arguments_follow, arguments = each.partition("[ARGS]")
        if arguments_follow:
            calls.append(Call(name.strip(), object_of(arguments), each))
            continue
        fields = _json(each)
        listed = fields if isinstance(fields, list) else [fields]
        calls += [call_of(one, each) for one in listed]
    return Parsed(content, "", tuple(calls), content, text)


def llama(tokenizer: ChatTokenizer, completion: SampledCompletion) -> Parsed:
    """Parses the calls of Llama 3: a completion that consists of `{"name": ..., "parameters":
    {...}}` alone.
    """
    text = text_of(tokenizer, completion.token_ids)
    written = text.strip().removeprefix("<|python_tag|>")
    fields = _json(written)
    if isinstance(fields, dict) and "name" in fields:
        return Parsed("", "", (call_of(fields, written),), "", text)
    if fields is None and LLAMA_CALL.match(written):
        return Parsed("", "", (Call("", None, written),), "", text)
    return Parsed(text, "", (), text, text)


def deepseek(tokenizer: ChatTokenizer, completion: SampledCompletion) -> Parsed:
    """Parses the calls of DeepSeek: the name, a line feed, and the arguments in a code fence.

    Replaces the parser of the renderers library, whose pattern takes time cubic in the length of a
    run of spaces.
    """
    text = text_of(tokenizer, completion.token_ids)
    reasoning, behind = _thought(tokenizer, completion.context, text)
    content, begun, section = behind.partition(CALLS_BEGIN)
    written = section.partition(CALLS_END)[0].split(CALL_BEGIN)[1:]
    if not begun or not written:
        return Parsed(behind.strip(), reasoning, (), text, text)
    spoken = text[: len(text) - len(behind) + len(content)]
    calls = tuple(_deepseek_call(each) for each in written)
    return Parsed(content.strip(), reasoning, calls, spoken, text)


def _deepseek_call(written: str) -> Call:
    """Parses a call of DeepSeek: `function<｜tool▁sep｜>NAME`, a line feed and the arguments."""
    body, ended, _ = written.partition(CALL_END)
    _, separated, named = body.partition(SEPARATOR)
    name, _, rest = named.strip().partition("\n")
    rest = rest.strip()
    if rest.startswith(FENCE) and rest.endswith(FENCE):
        rest = rest.removeprefix(FENCE).removesuffix(FENCE).removeprefix("json").strip()
    readable = bool(ended and separated and name.strip())
    return Call(name.strip(), object_of(rest or "{}") if readable else None, body)


def harmony(tokenizer: ChatTokenizer, completion: SampledCompletion) -> Parsed:
    """Parses the completions of gpt-oss, which consist of channels for reasoning, calls and
    content.
    """
    from renderers.parsing import parse_gpt_oss

    ids = {f"{name[2:-2]}_id": token_id(tokenizer, name) for name in (*HARMONY, "<|constrain|>")}
    start = ids["start_id"]
    # the completion begins within a message whose header ends the context
    head = [start, *tokenizer.encode_reply("assistant")]
    end = [ids["call_id"]] if completion.ended else []
    try:
        response = parse_gpt_oss(tokenizer.inner, [*head, *completion.token_ids, *end], **ids)
    except Exception as error:  # the library's, whatever the model wrote
        log.debug("a completion could not be taken apart", exc_info=error)
        return _unread_channels(text_of(tokenizer, completion.token_ids))
    return parsed_of(tokenizer, completion.token_ids, response)


def _unread_channels(text: str) -> Parsed:
    """Returns the Parsed of a gpt-oss completion that could not be parsed: its reasoning, and all
    text after the reasoning as a call without name and arguments.
    """
    thoughts = list(ANALYSIS.finditer(text))
    behind = thoughts[-1].end() if thoughts else 0
    reasoning = "".join(each[1] for each in thoughts).strip()
    return Parsed("", reasoning, (Call("", None, text[behind:]),), text[:behind], text)


def by_library(name: str) -> Parser:
    """Returns a parser that uses the tool parser `name` of the renderers library, which works on
    token ids.
    """

    def parser(tokenizer: ChatTokenizer, completion: SampledCompletion) -> Parsed:
        from renderers.base import ParsedResponse
        from renderers.parsers import get_tool_parser

        ids, closing = list(completion.token_ids), token_id(tokenizer, UNTHINK)
        behind = ids.index(closing) + 1 if closing in ids else 0
        reasoning = text_of(tokenizer, ids[: max(0, behind - 1)]).strip().removeprefix(THINK)
        try:
            content, calls = get_tool_parser(name, tokenizer.inner).extract(ids[behind:])
        except Exception as error:  # the library's, whatever the model wrote
            log.debug("a completion could not be taken apart", exc_info=error)
            return unread(tokenizer, completion)
        said = text_of(tokenizer, content).strip("\n")
        response = ParsedResponse(said, reasoning.strip("\n"), calls)
        return parsed_of(tokenizer, ids, response)

    return parser


def unread(tokenizer: ChatTokenizer, completion: SampledCompletion) -> Parsed:
    """Returns the Parsed of a completion that a parser failed on: its reasoning, and all text after
    the reasoning as a call without name and arguments.
    """
    text = text_of(tokenizer, completion.token_ids)
    reasoning, behind = _thought(tokenizer, completion.context, text)
    spoken = text[: len(text) - len(behind)]
    return Parsed("", reasoning, (Call("", None, behind),), spoken, text)


def parsed_of(tokenizer: ChatTokenizer, token_ids: Sequence[int], response: Any) -> Parsed:
    """Converts `response`, a ParsedResponse of the renderers library, to Parsed. `token_ids`: the
    completion's.
    """
    calls = [_read(each) for each in response.tool_calls]
    reasoning = (response.reasoning_content or "").strip("\n")
    text = text_of(tokenizer, token_ids)
    if not calls:
        return Parsed(response.content, reasoning, (), text, text)
    behind = text.find(UNTHINK) + len(UNTHINK) if UNTHINK in text else 0
    at = text.find(response.content, behind)
    spoken = text[: at + len(response.content)] if at >= 0 else response.content
    return Parsed(response.content, reasoning, tuple(calls), spoken, text)


def _read(call: Any) -> Call:
    """Converts a call of the renderers library; `arguments` is None if the library could not parse
    them.
    """
    from renderers.base import ToolCallParseStatus

    readable = call.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
    if not isinstance(call.name, str) or not _writable([call.name]):
        return Call("", None, call.raw)
    return Call(call.name, object_of(call.arguments) if readable else None, call.raw, call.id or "")


PARSERS: dict[str, Parser] = {
    "hermes": hermes,
    "mistral": mistral,
    "llama-3": llama,
    "gpt-oss": harmony,
    "deepseek-v3": deepseek,
    "glm": by_library("glm"),
    "qwen3.5": by_library("qwen3.5"),
}
# text in a chat template -> the parser of its format; the first match counts
SIGNS = {
    "<|channel|>": "gpt-oss",
    MISTRAL: "mistral",
    "<｜tool▁calls▁begin｜>": "deepseek-v3",
    "<arg_key>": "glm",
    "<function=": "qwen3.5",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama-3",
    '"parameters": ': "llama-3",
}


def parser_for(name: str, template: str) -> Parser:
    """Returns the parser `name`. "auto" selects the parser of the call format that occurs in the
    chat template `template` (its source), by default `hermes`.

    Raises ConfigError for an unknown name.
    """
    if name == "auto":
        name = next((found for sign, found in SIGNS.items() if sign in template), "hermes")
    if name not in PARSERS:
        raise ConfigError(
            f"environment.tool_parser={name} is none of auto, {', '.join(sorted(PARSERS))}."
        )
    return PARSERS[name]
