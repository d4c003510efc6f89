"""What is learnt of a conversation, compared with what transformers writes for its messages."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.data.supervised import Example, load_supervised, rows_of
from rftmega.data.tokenizer import Tokenizer
from tests.chat_formats import FORMATS, IM, PLAIN, TOOL, Format, template, tokenizer

LIMITS = {"max_prompt_tokens": 3000, "max_response_tokens": 3000}
USER = {"role": "user", "content": "2+2?"}
COMPLETION = {"role": "assistant", "content": "4"}
TOLD = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "4"}
# as DeepSeek's published template: the arguments are joined to other text, so only text will do
JOINS_TEXT = template("hermes").replace(
    "(call.function.arguments | tojson)", "call.function.arguments"
)
FORMS = {
    **{name: FORMATS[name] for name in ("qwen3", "glm", "deepseek", "llama", "gpt-oss", "mistral")},
    "hermes": FORMATS["hermes"],
    "joins text": Format(JOINS_TEXT, IM, ("<|im_end|>",)),
}
SHOWS_THINKING = ("qwen3", "glm", "gpt-oss")


def call(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments}
    return [{"id": "call00000", "type": "function", "function": function}]


CALLS = {"role": "assistant", "content": "", "tool_calls": call({"a": 2})}


def load(
    ours: Tokenizer, folder: Path, *conversations: Sequence[Any], **settings: Any
) -> list[Example]:
    records = [json.dumps({"messages": messages}) for messages in conversations]
    (folder / "a.jsonl").write_text("\n".join(records))
    config = DataConfig(prompt_key="messages", **settings)
    return load_supervised(folder / "a.jsonl", ours, config, **LIMITS)


def written(ours: Tokenizer, messages: Sequence[Any]) -> str:
    """Returns what transformers writes for messages."""
    text = ours.inner.apply_chat_template(list(messages), tokenize=False)
    assert isinstance(text, str)
    return text


def whole(ours: Tokenizer, example: Example) -> str:
    text = ours.inner.decode(example.prompt_ids + example.response_ids)
    assert isinstance(text, str)
    return text


def same(ours: Tokenizer, example: Example, text: str) -> bool:
    """Returns whether an example is `text`, but for what stands behind the token that ends it."""
    end = ours.inner.decode(example.response_ids[-1:])
    return whole(ours, example) in (text, text.rstrip("\n"), text + end)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("spoken", ["", "I add."])
def test_calls_of_the_last_message_are_trained(name: str, spoken: str, tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, FORMS[name])
    given = json.dumps({"a": 2}) if name == "joins text" else {"a": 2}
    expected = written(ours, [USER, {**CALLS, "content": spoken, "tool_calls": call(given)}])
    (found,) = load(ours, tmp_path, [USER, {**CALLS, "content": spoken}])
    assert same(ours, found, expected)
    assert "add" in ours.inner.decode(found.response_ids)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("text", ['{"a": 2}', '{ "a" :2}'])
def test_arguments_are_written_once_whether_they_are_given_as_text_or_not(
    name: str, text: str, tmp_path: Path
) -> None:
    ours = tokenizer(tmp_path, FORMS[name])
    conversation = [USER, CALLS, TOLD, COMPLETION]
    in_text = [USER, {**CALLS, "tool_calls": call(text)}, TOLD, COMPLETION]
    alone = [USER, {**CALLS, "tool_calls": call(text)}]
    one, other = load(ours, tmp_path, conversation, in_text)
    assert one == other
    assert "\\" not in whole(ours, one)
    assert load(ours, tmp_path, alone) == load(ours, tmp_path, [USER, CALLS])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_is_trained_under_any_name_or_reported(
    name: str, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = tokenizer(tmp_path, FORMS[name])
    own = "thinking" if name == "gpt-oss" else "reasoning_content"
    expected = written(ours, [USER, {**COMPLETION, own: "two and two"}])
    with caplog.at_level(logging.WARNING):
        (found,) = load(ours, tmp_path, [USER, {**COMPLETION, key: "two and two"}])
    assert same(ours, found, expected)
    assert ("two and two" in ours.inner.decode(found.response_ids)) == (name in SHOWS_THINKING)
    said = f"does not render {key} of the last message (assistant) in 1 record(s)"
    assert (said in caplog.text) == (name not in SHOWS_THINKING)


def test_what_a_template_leaves_out_is_reported_once_with_its_number_and_first_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = tokenizer(tmp_path, FORMATS["qwen3"])
    thought = {**COMPLETION, "reasoning_content": "Hm."}
    plain = [USER, COMPLETION]
    twice = [USER, thought, USER, {**COMPLETION, "remark": "easy"}]
    with caplog.at_level(logging.WARNING):
        load(ours, tmp_path, plain, twice, twice)
    told = [record.getMessage() for record in caplog.records]
    assert [each.partition("render ")[2].partition(":")[0] for each in told] == [
        f"reasoning_content of an earlier message (assistant) in 2 record(s), the first at {tmp_path}/a.jsonl",
        f"remark of the last message (assistant) in 2 record(s), the first at {tmp_path}/a.jsonl",
    ]


def test_an_answer_of_which_nothing_is_rendered_is_refused(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, PLAIN["chatml"])
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*renders nothing of the answer.*tool_calls"):
        load(ours, tmp_path, [USER, COMPLETION], [USER, CALLS])


def test_calls_behind_a_prompt_that_does_not_go_through_a_template_are_refused(
    tmp_path: Path,
) -> None:
    ours = tokenizer(tmp_path, FORMATS["qwen3"])
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "2+2?", "response": [CALLS]}))
    with pytest.raises(DataError, match="Set data.chat_template=true"):
        load_supervised(tmp_path / "a.jsonl", ours, DataConfig(), **LIMITS)
    config = DataConfig(chat_template=True)
    (found,) = load_supervised(tmp_path / "a.jsonl", ours, config, **LIMITS)
    assert same(ours, found, written(ours, [USER, CALLS]))


TALK = [
    USER,
    COMPLETION,
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]


def trained(ours: Tokenizer, examples: Sequence[Example]) -> list[str]:
    rows = rows_of(examples)
    return [
        ours.inner.decode(tokens[1:][mask].tolist())
        for tokens, mask in zip(rows.tokens, rows.mask, strict=True)
    ]


def test_all_turns_are_trained_in_one_row_where_the_template_only_goes_on(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, PLAIN["chatml"])
    (last,) = load(ours, tmp_path, TALK)
    (every,) = load(ours, tmp_path, TALK, trained_turns="all")
    assert whole(ours, last) == whole(ours, every) == written(ours, TALK).rstrip("\n")
    assert trained(ours, [last]) == ["6<|im_end|>"]
    assert trained(ours, [every]) == ["4<|im_end|>6<|im_end|>"]


@pytest.mark.parametrize("name", FORMS)
def test_each_of_all_turns_is_trained_as_it_is_when_it_is_the_last(
    name: str, tmp_path: Path
) -> None:
    ours = tokenizer(tmp_path, FORMS[name])
    talk = [USER, CALLS, TOLD, {**COMPLETION, "reasoning_content": "Four."}, *TALK[2:]]
    found = load(ours, tmp_path, talk, trained_turns="all")
    alone = load(ours, tmp_path, talk[:2], talk[:4], talk)
    assert "".join(trained(ours, found)) == "".join(trained(ours, alone))
    assert [whole(ours, each) for each in found][-1] == whole(ours, alone[-1])
    contexts = {whole(ours, each) for each in found}
    assert all(any(row.startswith(whole(ours, each)) for row in contexts) for each in alone)


def test_an_answer_that_a_conversation_begins_with_is_context(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, PLAIN["chatml"])
    (found,) = load(ours, tmp_path, [COMPLETION, *TALK], trained_turns="all")
    assert trained(ours, [found]) == ["4<|im_end|>6<|im_end|>"]


def test_messages_that_were_exported_are_read_back_whole(tmp_path: Path) -> None:
    """`rftmega export-messages` writes thinking under reasoning_content, arguments as text."""
    ours = tokenizer(tmp_path, FORMATS["qwen3"])
    completion = {
        **COMPLETION,
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": call('{"a": 2}'),
    }
    (found,) = load(ours, tmp_path, [USER, completion])
    assert ours.inner.decode(found.response_ids) == (
        "<think>\nHm.\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    )


@pytest.mark.parametrize("form", [[TOOL], json.dumps([TOOL]), [TOOL["function"]]])
@pytest.mark.parametrize("name", ["qwen3", "glm", "llama", "gpt-oss", "mistral", "hermes"])
def test_functions_of_a_record_are_told_to_the_model(name: str, form: Any, tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, FORMS[name])
    expected = ours.inner.apply_chat_template([USER, CALLS], tools=[TOOL], tokenize=False)
    record = {"messages": [USER, CALLS], "functions": form}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    config = DataConfig(prompt_key="messages", tools_key="functions")
    (found,) = load_supervised(tmp_path / "a.jsonl", ours, config, **LIMITS)
    assert same(ours, found, expected)
    assert "Adds." in ours.inner.decode(found.prompt_ids)


def test_functions_that_the_template_does_not_read_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = tokenizer(tmp_path, PLAIN["chatml"])
    record = {"messages": [USER, COMPLETION], "tools": [TOOL]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    config = DataConfig(prompt_key="messages")
    with caplog.at_level(logging.WARNING):
        load_supervised(tmp_path / "a.jsonl", ours, config, **LIMITS)
    assert 'does not render "tools" in 1 record(s)' in caplog.text


@pytest.mark.parametrize("given", ["{", 7, ["search"], [{"function": "f"}], {"a": 1}])
def test_functions_that_are_none_are_refused(given: Any, tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, FORMS["qwen3"])
    record = {"messages": [USER, COMPLETION], "tools": given}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(DataError, match=r'a\.jsonl:1: "tools" '):
        load_supervised(tmp_path / "a.jsonl", ours, DataConfig(prompt_key="messages"), **LIMITS)
