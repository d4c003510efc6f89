"""No answer that a model can sample leaves the parser of its format as an exception."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftmega.data.chat.renderer import ConversationRenderer, Reply
from rftmega.data.chat.replies import UNREAD, text_of
from tests.chat_formats import FORMATS, PLAIN, TOOL, Format, tokenizer

EVERY = {**FORMATS, **PLAIN}
BOTH = [(name, "auto") for name in EVERY]
BOTH += [(name, "template") for name, form in EVERY.items() if form.library != "template"]
# what a model repeats or puts into a call where it goes wrong
PIECES = (
    *("9" * 5000, "-" + "1" * 4301, "[" * 2000, '{"a":' * 1500, "[" * 500 + "]" * 500, "1e999"),
    *("-1e999", "NaN", "Infinity", '"\\ud800"', "\\udc00", "\x00", "\ufffd", '"', "\\", "'"),
    *(
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "null",
        "true",
        '{"name": ["x"]}',
        '{"name": 5, "arguments": 1}',
    ),
    *('"name"', '"arguments"', '"parameters"', '"id": 7', "\n", "\n\n", " " * 3000, "ab cd", "```"),
    *("```json", "<think>", "</think>", "\ue000\ue001", "\ufdd0", "é", "\U0001f642"),
)
BROKEN = (
    *("9" * 5000, "[" * 2000, "1e999", "-1e999", "NaN", "[" * 500 + "1" + "]" * 500, '"\\ud800"'),
)


def completions(form: Format, encode: Any, size: int, seed: str, cases: int) -> Iterator[list[int]]:
    """Yields answers in tokens: of random ids, and calls that are cut off, mixed up or repeated."""
    chance = random.Random(seed)
    whole = [text for text in (form.call, form.final) if text]
    pieces = [list(encode(each)) for each in (*PIECES, *form.special, *whole)]
    for _ in range(cases):
        ids = list(encode(chance.choice(whole)))
        kind = chance.randrange(4)
        if kind == 0:  # some ids have no token: a model may have more rows than its tokenizer
            ids = [chance.randrange(size + 20) for _ in range(chance.randrange(1, 60))]
        if kind == 1:
            del ids[chance.randrange(len(ids)) :]
        for _ in range(chance.randrange(1, 4) if kind >= 2 else 0):
            start = chance.randrange(len(ids) + 1)
            stop = min(len(ids), start + chance.randrange(9))
            ids[start:stop] = chance.choice(pieces) * chance.choice((1, 1, 1, 3))
        yield ids + list(encode(chance.choice(form.ends))) * chance.randrange(2)


def check(reply: Reply, ids: list[int], renderer: ConversationRenderer) -> None:
    """Holds a reply to what calls, templates and servers make of it."""
    for call in reply.calls:
        (call.name + call.id).encode()
        assert isinstance(call.text, str)
        if call.arguments is not None:
            json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()
    unread = any(call.arguments is None for call in reply.calls)
    assert reply.problem == (UNREAD if unread else "")
    said = ids[:-1] if reply.complete else ids
    assert reply.text == text_of(renderer.tokenizer, said)
    assert renderer.message(reply)["role"] == "assistant"


@pytest.mark.parametrize("cases", [500, pytest.param(2000, marks=pytest.mark.ranks)])
@pytest.mark.parametrize(("name", "library"), BOTH)
def test_no_exception_leaves_the_parser_whatever_the_model_writes(
    name: str, library: str, cases: int, tmp_path: Path
) -> None:
    form = EVERY[name]
    tools = (TOOL,) if form.call else ()
    own = tokenizer(tmp_path, form, tools=tools)
    renderer = ConversationRenderer.of(own, library)
    assert renderer.name == (form.library if library == "auto" else "template")
    context = own.encode([{"role": "user", "content": "1+3?"}], chat_template=True)
    seed = f"{name} {library}"
    for ids in completions(form, own.encode_reply, len(own.inner), seed, cases):
        check(renderer.parse(context, ids, tools), ids, renderer)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda text: text[:8])
@pytest.mark.parametrize(("name", "library"), [each for each in BOTH if each[0] in FORMATS])
def test_a_call_whose_arguments_are_no_json_is_a_call_that_can_not_be_read(
    name: str, library: str, broken: str, tmp_path: Path
) -> None:
    form = FORMATS[name]
    own = tokenizer(tmp_path, form, tools=(TOOL,))
    renderer = ConversationRenderer.of(own, library)
    context = own.encode([{"role": "user", "content": "1+3?"}], chat_template=True)
    place = form.call.rindex("1") if name == "glm" else form.call.index("1", form.call.index('"a"'))
    completion = form.call[:place] + broken + form.call[place + 1 :]
    reply = renderer.parse(context, own.encode_reply(completion), (TOOL,))
    assert [call.arguments for call in reply.calls] == [None]
    assert reply.problem == UNREAD
    assert reply.reasoning == ("I add." if "I add." in form.call else "")


@pytest.mark.parametrize("library", ["auto", "template"])
def test_spaces_behind_a_fence_are_read_in_a_moment(library: str, tmp_path: Path) -> None:
    """A pattern that goes back over them takes minutes for 3,000, and holds the engine up."""
    form = FORMATS["deepseek"]
    own = tokenizer(tmp_path, form, tools=(TOOL,))
    renderer = ConversationRenderer.of(own, library)
    context = own.encode([{"role": "user", "content": "1+3?"}], chat_template=True)
    for odd in ("```json" + " " * 3000 + "x", "a" * 3000, "\n" * 3000):
        completion = form.call.replace('```json\n{"a": 1}\n```', odd)
        (call,) = renderer.parse(context, own.encode_reply(completion), (TOOL,)).calls
        assert call.arguments is None or not odd.strip()


@pytest.mark.parametrize(
    "text", ['{"name": "add", "parameters": {"a": 1', '{ "name"', '{"name": 1}']
)
def test_a_broken_call_of_llama_is_a_call_that_can_not_be_read(text: str, tmp_path: Path) -> None:
    form = FORMATS["llama"]
    own = tokenizer(tmp_path, form, tools=(TOOL,))
    renderer = ConversationRenderer.of(own)
    reply = renderer.parse((), own.encode_reply(f"{text}{form.ends[0]}"), (TOOL,))
    assert [(call.arguments, call.text) for call in reply.calls] == [(None, text)]
    said = renderer.parse((), own.encode_reply('{"b": 1'), (TOOL,))
    assert (said.calls, said.content) == ((), '{"b": 1')
