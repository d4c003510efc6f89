"""Conversations in every chat format of tests/chat_formats.py have the tokens that transformers'
apply_chat_template gives them.
"""

from pathlib import Path
from typing import Any

import pytest

from rftmega.core.errors import DataError
from rftmega.data.tokenizer import Tokenizer
from tests.chat_formats import FORMATS, MORE, PLAIN, TOOL, tokenizer

EVERY = {**FORMATS, **PLAIN, **MORE}
SYSTEM = {"role": "system", "content": "Be brief, s'il te plaît."}
ASKED = {"role": "user", "content": "  What is\n2 + 3? \n"}
REPLIED = {"role": "assistant", "content": "It is 5.\n\nOr 4 + 1 🙂"}
AGAIN = {"role": "user", "content": "日本 {{ messages }} \\n"}
CALL = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "call00000"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [ASKED],
    "a system message": [SYSTEM, ASKED],
    "several turns": [ASKED, REPLIED, AGAIN],
    "several turns with a system message": [SYSTEM, ASKED, REPLIED, AGAIN, REPLIED, ASKED],
    "reasoning": [ASKED, {**REPLIED, "reasoning_content": "Two and\nthree."}, AGAIN],
    "a text that is continued": [ASKED, {**REPLIED, "content": "It is"}],
    "a call": [ASKED, CALLED, RESULT],
    "a call after turns": [SYSTEM, ASKED, REPLIED, AGAIN, CALLED, RESULT],
    "two users": [ASKED, AGAIN],
}
TOOLS = {"a call", "a call after turns"}


def theirs(
    ours: Tokenizer, messages: list[dict[str, Any]], *, tools: bool, open_: bool = True
) -> list[int] | None:
    """Returns transformers' tokens of a conversation; None if the template refuses it."""
    goes_on = open_ and messages[-1]["role"] == "assistant"
    try:
        found = ours.inner.apply_chat_template(
            [read_by(ours, each) for each in messages],
            tools=[TOOL] if tools else None,
            add_generation_prompt=open_ and not goes_on,
            continue_final_message=goes_on,
            tokenize=True,
            return_dict=False,
        )
    except Exception:
        return None
    return list(found)


def read_by(ours: Tokenizer, message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with the fields that this template reads, as a user of transformers has to."""
    found = dict(message)
    if "part in m.content" in ours.template.source():
        found["content"] = [{"type": "text", "text": message["content"]}]
    if "reasoning_content" in message and "m.thinking" in ours.template.source():
        found["thinking"] = found.pop("reasoning_content")
    return found


@pytest.mark.parametrize("name", EVERY)
def test_every_conversation_has_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, EVERY[name])
    compared = 0
    for kind, messages in CONVERSATIONS.items():
        tools = kind in TOOLS
        wanted = theirs(ours, messages, tools=tools)
        specs = [TOOL] if tools else ()
        if wanted is None:
            with pytest.raises(DataError):
                ours.encode(messages, chat_template=True, tools=specs)
            continue
        found = list(ours.encode(messages, chat_template=True, tools=specs))
        assert ours.inner.decode(found) == ours.inner.decode(wanted), kind
        assert found == wanted, kind
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize("name", EVERY)
def test_a_response_behind_its_prompt_has_the_tokens_of_transformers(
    name: str, tmp_path: Path
) -> None:
    ours = tokenizer(tmp_path, EVERY[name])
    prompt, response = [ASKED], {"role": "assistant", "content": "It is 5."}
    whole = theirs(ours, [*prompt, response], tools=False, open_=False)
    assert whole is not None
    before = list(ours.encode(prompt, chat_template=True))
    if whole[: len(before)] != before:
        with pytest.raises(DataError, match="does not go on with the answer"):
            ours.encode_response(prompt, response, chat_template=True)
        return
    found = list(ours.encode_response(prompt, response, chat_template=True))
    said, (end,) = whole[len(before) :], found[-1:]
    assert end in ours.stop_ids
    size = len(found) if end in said else len(found) - 1  # GLM's template writes no end
    assert said[:size] == found[:size]
    assert not ours.inner.decode(said[size:]).strip()
