"""Chat records of foreign forms: converted, or refused with file and record."""

import json
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.data.chat.messages import chat_messages
from rftmega.data.preference import load_preferences
from rftmega.data.prompts import load_prompts
from rftmega.data.supervised import load_supervised
from rftmega.data.tokenizer import Chat, Tokenizer
from tests.chat_formats import FORMATS, IM, PLAIN, Format, template, tokenizer

HI = {"role": "user", "content": "hi"}
NO = {"role": "assistant", "content": "no"}
# as SmolVLM's and Idefics3's published templates: content is a list of parts, text alone is not read
OF_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prompts(ours: Tokenizer, folder: Path, *values: Any, **settings: Any) -> list[str]:
    lines = [json.dumps({"prompt": value, "label": "1"}) for value in values]
    (folder / "a.jsonl").write_text("\n".join(lines))
    config = DataConfig(**settings)
    found = load_prompts(folder / "a.jsonl", ours, config, max_prompt_tokens=3000)
    return [ours.inner.decode(each.token_ids) for each in found]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": None}, "has no content: it is null"),
        ({"role": "user"}, "has no content: it is missing"),
        ({"role": "user", "content": ""}, "has empty content"),
        ({"role": "user", "content": " \n"}, "has empty content"),
        ({"role": "system", "content": ""}, "has empty content"),
        ({"role": "assistant", "content": ""}, "has empty content"),
        ({"role": "tool", "content": None}, "has no content: it is null"),
        ({"role": "human", "content": "hi"}, "has the role 'human'"),
        ({"role": "", "content": "hi"}, "has the role ''"),
        ({"role": None, "content": "hi"}, "has the role None"),
        ({"content": "hi"}, "has the role None"),
        ({"role": ["user"], "content": "hi"}, "has the role"),
        ({"role": "user", "content": 7}, "has the content 7"),
        ({"role": "user", "content": {"text": "hi"}}, "has the content"),
        ({"role": "user", "content": []}, "has empty content"),
        ({"role": "user", "content": ["hi"]}, "has the part 'hi'"),
        ({"role": "user", "content": [{"type": "text"}]}, 'whose "text" is no text'),
        ({"role": "user", "content": [{"type": "text", "text": " "}]}, "has empty content"),
        ("hi", "is 'hi', not an object"),
        (7, "is 7, not an object"),
        (["user", "hi"], "not an object"),
        ({"from": "alien", "value": "hi"}, "is from 'alien'"),
        ({"from": "human", "value": None}, "has no content: it is null"),
        ({"from": "human", "value": ""}, "has empty content"),
        ({"from": "function_call", "value": "{"}, "is a call whose text is not JSON"),
        ({"role": "assistant", "content": "", "tool_calls": {"name": "f"}}, "not a list"),
        ({"role": "assistant", "content": "", "tool_calls": [7]}, "without the name of a function"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
            "whose arguments are no JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]},
            "whose arguments are not JSON",
        ),
    ],
)
def test_a_malformed_message_is_refused_with_its_record(
    message: Any, said: str, tmp_path: Path
) -> None:
    ours = tokenizer(tmp_path, FORMATS["qwen3"])
    with pytest.raises(DataError) as caught:
        prompts(ours, tmp_path, [HI], [HI, message, HI])
    assert str(caught.value).startswith(f'{tmp_path}/a.jsonl:2: message 1 of "prompt" ')
    assert said in str(caught.value)


def test_answers_and_preferences_are_checked_as_prompts_are(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, FORMATS["qwen3"])
    empty = {"role": "assistant", "content": None}
    path = tmp_path / "a.jsonl"
    limits = {"max_prompt_tokens": 99, "max_response_tokens": 99}
    path.write_text(json.dumps({"prompt": [HI, empty]}))
    with pytest.raises(DataError, match=r'a\.jsonl:1: message 1 of "prompt" has no content'):
        load_supervised(path, ours, DataConfig(), **limits)
    path.write_text(json.dumps({"prompt": [HI], "chosen": [NO], "rejected": [empty]}))
    with pytest.raises(DataError, match=r'a\.jsonl:1: message 0 of "rejected" has no content'):
        load_preferences(path, ours, DataConfig(), **limits)


def test_messages_of_sharegpt_are_those_of_openai(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, FORMATS["qwen3"])
    call = {"name": "add", "arguments": {"a": 1}}
    theirs = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "1+0?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "1"},
        {"from": "human", "value": "Sure?"},
    ]
    own = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+0?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "id": "x", "function": call}]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Sure?"},
    ]
    one, other = prompts(ours, tmp_path, theirs, own)
    assert one == other
    assert one.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+0?")
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in one


def test_a_call_of_openais_old_api_and_one_without_its_wrapping_are_calls() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    wanted = {"name": "f", "arguments": {"a": 1}}
    for fields in (
        {"function_call": function},
        {"tool_calls": [function]},
        {"tool_calls": [{"function": function}]},
    ):
        (message,) = chat_messages([{"role": "assistant", "content": None, **fields}], "prompt")
        assert message == {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "call00000", "function": wanted}],
        }


def test_fields_that_a_table_gives_as_null_are_not_there(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, FORMATS["qwen3"])
    padded = {"tool_calls": None, "reasoning_content": None, "name": None}
    given = [{**message, **padded} for message in (HI, NO, HI)]
    one, other = prompts(ours, tmp_path, [HI, NO, HI], given)
    assert one == other
    assert chat_messages(given, "prompt") == [HI, NO, HI]


def test_a_role_that_the_template_names_itself_is_known(tmp_path: Path) -> None:
    named = template("chatml").replace(
        "'<|im_start|>' + m.role", "'<|im_start|>' + ('x' if m.role == 'critic' else m.role)"
    )
    message = {"role": "critic", "content": "hm"}
    ours = tokenizer(tmp_path, Format(named, IM, ("<|im_end|>",)))
    assert prompts(ours, tmp_path, [HI, message])[0].split("\n")[2] == "<|im_start|>x"
    with pytest.raises(DataError, match="has the role 'critic'"):
        prompts(tokenizer(tmp_path, PLAIN["chatml"]), tmp_path, [HI, message])


def test_parts_of_text_reach_a_model_of_text_as_text(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, PLAIN["chatml"])
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert prompts(ours, tmp_path, [{"role": "user", "content": parts}]) == [
        "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    ]


def test_a_template_that_reads_parts_gets_parts(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, Format(OF_PARTS, IM, ("<|im_end|>",)))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = prompts(ours, tmp_path, [{"role": "user", "content": parts}], [HI])
    assert [each.split("\n")[1] for each in found] == ["ab<|im_end|>", "hi<|im_end|>"]


def test_a_part_that_a_template_of_text_can_not_show_is_refused(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, PLAIN["chatml"])
    part = {"type": "file", "file": "a.pdf"}
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*a part of the type 'file'"):
        prompts(ours, tmp_path, [{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    "source", ["hello", "{% for m in messages %}{{ m.role }}{% endfor %}", "{{ messages|length }}"]
)
def test_a_template_that_renders_no_message_is_refused(source: str, tmp_path: Path) -> None:
    said = "renders nothing of what a user says"
    with pytest.raises(DataError, match=said):
        tokenizer(tmp_path, PLAIN["chatml"], template=source)
    own = tokenizer(tmp_path, Format(source, IM, ("<|im_end|>",)))
    with pytest.raises(DataError, match=rf"a\.jsonl:1: .*{said}"):
        prompts(own, tmp_path, [HI])


@pytest.mark.parametrize("name", ["qwen3", "glm", "llama", "mistral", "hermes"])
def test_a_prompt_that_ends_with_the_assistant_is_gone_on_with_or_refused(
    name: str, tmp_path: Path
) -> None:
    ours = tokenizer(tmp_path, FORMATS[name])
    begun = [HI, {"role": "assistant", "content": "The answer"}]
    (found,) = prompts(ours, tmp_path, begun)
    expected = ours.inner.apply_chat_template(begun, tokenize=False, continue_final_message=True)
    assert found == expected
    assert found.endswith("The answer")
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*data\.trailing_assistant=reject"):
        prompts(ours, tmp_path, begun, trailing_assistant="reject")


def test_a_prompt_that_ends_with_a_call_can_not_be_gone_on_with(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, FORMATS["qwen3"])
    called = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*with which no answer can go on"):
        prompts(ours, tmp_path, [HI, called])


def test_an_answer_to_learn_goes_on_with_the_text_that_its_prompt_ends_with(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, PLAIN["chatml"])
    begun = [HI, {"role": "assistant", "content": "The answer"}]
    record = {"prompt": begun, "chosen": " is 4", "rejected": [{**NO, "content": " is 5"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    limits = {"max_prompt_tokens": 99, "max_response_tokens": 99}
    (pair,) = load_preferences(tmp_path / "a.jsonl", ours, DataConfig(), **limits)
    assert ours.inner.decode(pair.chosen.prompt_ids).endswith("assistant\nThe answer")
    completions = [ours.inner.decode(each.response_ids) for each in (pair.chosen, pair.rejected)]
    assert completions == [" is 4<|im_end|>", " is 5<|im_end|>"]


def test_a_system_prompt_of_the_run_stands_before_converted_messages(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, PLAIN["chatml"], system="Be brief.")
    assert ours.chat == Chat(system="Be brief.")
    theirs = [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "hi"}]
    one, other = prompts(ours, tmp_path, theirs, theirs[1:])
    assert one.startswith("<|im_start|>system\nBe kind.")
    assert other.startswith("<|im_start|>system\nBe brief.")
