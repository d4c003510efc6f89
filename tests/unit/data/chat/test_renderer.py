"""Answers are taken apart, and gone on behind, in the chat formats of model families."""

import logging
from pathlib import Path
from typing import Any

import pytest

from rftmega.core.errors import ConfigError, DataError
from rftmega.data.chat.renderer import ConversationRenderer, Reply
from rftmega.data.chat.replies import text_of
from tests.chat_formats import FORMATS, HERMES_CALL, PLAIN, TOOL, Format, template, tokenizer

ASKED = [{"role": "user", "content": "1+3? abcd"}]
EVERY = pytest.mark.parametrize("name", FORMATS)


def said(reply: Reply, content: str = "4") -> list[dict[str, Any]]:
    """The tool's answers to the calls of a reply."""
    return [
        {"role": "tool", "name": call.name, "content": content, "tool_call_id": call.id}
        for call in reply.calls
    ]


class Talk:
    """The first call of a conversation in one format."""

    def __init__(self, path: Path, form: Format, completion: str | None = None, **options: Any):
        chat = options.pop("chat", {})
        self.tools = (TOOL,) if form.call else ()
        self.tokenizer = tokenizer(path, form, tools=self.tools, **chat)
        self.renderer = ConversationRenderer.of(self.tokenizer, **options)
        self.first = self.tokenizer.encode(ASKED, chat_template=True)
        self.completion = self.tokenizer.encode_reply(
            form.call if completion is None else completion
        )
        self.reply = self.renderer.parse(self.first, self.completion, self.tools)
        self.history = [*ASKED, self.renderer.message(self.reply)]

    def bridge(self, messages: list[dict[str, Any]], completion: Any = None) -> Any:
        ids = self.completion if completion is None else completion
        return self.renderer.bridge(self.first, ids, messages, self.tools, history=self.history)

    def written(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        return self.renderer.render([*self.history, *messages], self.tools)


@EVERY
def test_a_call_is_read_and_its_reply_stands_behind_what_was_sampled(
    name: str, tmp_path: Path
) -> None:
    form = FORMATS[name]
    talk = Talk(tmp_path, form)
    assert talk.renderer.name == form.library
    assert [(call.name, call.arguments) for call in talk.reply.calls] == [("add", {"a": 1})]
    assert (talk.reply.complete, talk.reply.problem, talk.reply.content) == (True, "", "")
    assert talk.reply.reasoning == ("I add." if "I add." in form.call else "")
    messages = said(talk.reply)
    bridge = talk.bridge(messages)
    assert text_of(talk.tokenizer, bridge.token_ids) == form.tool_delta
    assert (*talk.first, *talk.completion, *bridge.token_ids) == talk.written(messages)
    (turn,) = bridge.turns
    assert (turn.role, turn.name, turn.reward) == ("tool", "add", 0.0)
    words = text_of(talk.tokenizer, bridge.token_ids[turn.start : turn.stop])
    assert words in ("4", '"4"')


@EVERY
def test_the_template_alone_says_the_same_as_the_library(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    ours = Talk(tmp_path, form, name="template")
    theirs = Talk(tmp_path, form)
    assert ours.renderer.library is None
    messages = said(theirs.reply)
    one, other = ours.bridge(messages), theirs.bridge(messages)
    assert one.token_ids == other.token_ids
    assert other.turns[0].start <= one.turns[0].start < one.turns[0].stop <= other.turns[0].stop
    assert ours.history == theirs.history
    read = [(call.name, call.arguments, call.id) for call in ours.reply.calls]
    assert read == [(call.name, call.arguments, call.id) for call in theirs.reply.calls]


@pytest.mark.parametrize("library", ["auto", "template"])
@EVERY
def test_a_long_reply_of_several_lines_is_what_the_template_writes(
    name: str, library: str, tmp_path: Path
) -> None:
    talk = Talk(tmp_path, FORMATS[name], name=library)
    messages = said(talk.reply, 'ab\n\ncd "é" 12')
    bridge = talk.bridge(messages)
    assert (*talk.first, *talk.completion, *bridge.token_ids) == talk.written(messages)


@pytest.mark.parametrize("library", ["auto", "template"])
@EVERY
def test_sampled_pieces_that_would_be_encoded_otherwise_stay_as_they_are(
    name: str, library: str, tmp_path: Path
) -> None:
    form = FORMATS[name]
    completion = form.final.replace("4", "abcd")
    talk = Talk(tmp_path, form, completion, name=library)
    inner = talk.tokenizer.inner
    odd = tuple(inner.convert_tokens_to_ids(each) for each in ("ab", "cd"))
    even = talk.tokenizer.encode_reply("abcd")
    at = next(at for at in range(len(talk.completion)) if talk.completion[at : at + 3] == even)
    sampled = (*talk.completion[:at], *odd, *talk.completion[at + len(even) :])
    assert sampled != talk.completion
    assert text_of(talk.tokenizer, sampled) == text_of(talk.tokenizer, talk.completion)
    messages = [{"role": "user", "content": "Sure?"}]
    assert talk.bridge(messages, sampled) == talk.bridge(messages)


@EVERY
def test_behind_the_user_a_bridge_is_what_the_template_writes_or_there_is_none(
    name: str, tmp_path: Path
) -> None:
    form = FORMATS[name]
    talk = Talk(tmp_path, form, form.final)
    messages = [{"role": "user", "content": "Sure?"}]
    bridge, whole = talk.bridge(messages), talk.written(messages)
    kept = whole[: len(talk.first) + len(talk.completion)] == (*talk.first, *talk.completion)
    thinks = "Four." in form.final
    assert kept != (thinks or name == "gpt-oss")  # gpt-oss ends the last answer otherwise
    assert (bridge is not None) == kept
    if bridge:
        assert (*talk.first, *talk.completion, *bridge.token_ids) == whole


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_format_goes_on_behind_the_user_unless_it_rewrites(
    name: str, tmp_path: Path
) -> None:
    form = PLAIN[name]
    talk = Talk(tmp_path, form, form.final)
    messages = [{"role": "user", "content": "Sure?"}]
    bridge = talk.bridge(messages)
    if name in ("r1", "counts"):
        assert bridge is None
    else:
        assert (*talk.first, *talk.completion, *bridge.token_ids) == talk.written(messages)


def test_thinking_that_every_rendering_drops_is_not_gone_on_behind(tmp_path: Path) -> None:
    """R1's template without the thinking that it begins: what stands before stays, but the answer."""
    form = PLAIN["r1"]
    silent = Format(template("r1").replace("<think>\\n", ""), form.special, form.ends)
    talk = Talk(tmp_path, silent, f"<think>Hm.</think>4{form.ends[0]}")
    assert talk.bridge([{"role": "user", "content": "Sure?"}]) is None


def test_a_head_that_tells_the_time_is_followed_as_long_as_it_says_the_same(tmp_path: Path) -> None:
    form = Format(
        template("clock"),
        FORMATS["hermes"].special,
        ("<|im_end|>",),
        call=f"{HERMES_CALL}<|im_end|>",
    )
    talk = Talk(tmp_path, form, chat={"given": {"now": "8:15"}})
    assert "It is 8:15" in text_of(talk.tokenizer, talk.first)
    assert talk.bridge(said(talk.reply)).token_ids


def test_an_answer_in_other_words_of_the_same_meaning_is_kept_as_it_was_sampled(
    tmp_path: Path,
) -> None:
    """The template writes JSON with its own spaces; the answer had others."""
    form = FORMATS["hermes"]
    loose = HERMES_CALL.replace(
        '{"name": "add", "arguments": {"a": 1}}', '{"arguments":{"a":1},"name":"add"}'
    )
    talk = Talk(tmp_path, form, f"{loose}<|im_end|>")
    assert talk.reply.calls[0].arguments == {"a": 1}
    assert text_of(talk.tokenizer, talk.bridge(said(talk.reply)).token_ids) == form.tool_delta


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>', "JSON"),
        ('<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>', "JSON"),
        ('<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', "JSON"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}', "JSON"),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "qwen3", "qwen3 without its table"])
def test_a_call_that_can_not_be_read_is_a_call_with_a_problem_and_is_kept_as_it_was(
    call: str, words: str, name: str, tmp_path: Path
) -> None:
    talk = Talk(tmp_path, FORMATS[name], f"{call}<|im_end|>")
    (found,) = talk.reply.calls
    assert found.arguments is None
    assert words in talk.reply.problem
    messages = [{"role": "user", "content": talk.reply.problem}]
    bridge = talk.bridge(messages)
    assert (*talk.first, *talk.completion, *bridge.token_ids) == talk.written(messages)


def test_two_calls_of_which_one_is_broken_are_two_calls(tmp_path: Path) -> None:
    broken = HERMES_CALL.replace("}}", "}")
    talk = Talk(tmp_path, FORMATS["qwen3"], f"{HERMES_CALL}\n{broken}<|im_end|>")
    assert [call.arguments for call in talk.reply.calls] == [{"a": 1}, None]
    assert [call.id for call in talk.reply.calls] == ["call00000", "call00001"]


@pytest.mark.parametrize("library", ["auto", "template"])
def test_thinking_that_only_talks_of_a_call_calls_nothing(library: str, tmp_path: Path) -> None:
    completion = f"<think>\n{HERMES_CALL}\n</think>\n\nNo.<|im_end|>"
    talk = Talk(tmp_path, FORMATS["qwen3"], completion, name=library)
    assert (talk.reply.calls, talk.reply.content) == ((), "No.")


@pytest.mark.parametrize(
    ("completion", "missing"),
    [
        ("<think>\nI ad", "\n</think>\n\n<|im_end|>"),
        ("<think>\nI add.\n</think>\n\nIt is", "<|im_end|>"),
    ],
)
def test_an_answer_that_was_cut_off_gets_the_end_that_the_template_writes(
    completion: str, missing: str, tmp_path: Path
) -> None:
    form = FORMATS["qwen3"]
    talk = Talk(tmp_path, form, completion)
    assert not talk.reply.complete
    messages = [{"role": "tool", "name": "add", "content": "4"}]
    bridge = talk.bridge(messages)
    assert text_of(talk.tokenizer, bridge.token_ids) == missing + form.tool_delta
    assert (*talk.first, *talk.completion, *bridge.token_ids) == talk.written(messages)


def test_ends_of_calls_that_the_folder_does_not_list_are_told(tmp_path: Path) -> None:
    talk = Talk(tmp_path, FORMATS["gpt-oss"])
    assert text_of(talk.tokenizer, talk.renderer.stop_ids) == "<|call|>"
    assert Talk(tmp_path / "b", FORMATS["hermes"]).renderer.stop_ids == []


def test_a_renderer_that_writes_otherwise_than_the_folder_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    form = FORMATS["qwen3"]
    other = Format(
        template("qwen3").replace("# Tools", "# Functions"),
        form.special,
        form.ends,
        "qwen3",
        form.call,
    )
    talk = Talk(tmp_path, other)
    assert talk.renderer.name == "template"
    assert "it differs in the conversation [user] with tools" in caplog.text
    messages = said(talk.reply)
    assert (*talk.first, *talk.completion, *talk.bridge(messages).token_ids) == talk.written(
        messages
    )
    with pytest.raises(ConfigError, match=r"renderer=qwen3 writes otherwise .*with tools"):
        ConversationRenderer.of(talk.tokenizer, "qwen3")
    with pytest.raises(ConfigError, match="renderer=llama-3 does not fit"):
        ConversationRenderer.of(talk.tokenizer, "llama-3")
    with pytest.raises(ConfigError, match="tool_parser=x is none of auto"):
        ConversationRenderer.of(talk.tokenizer, tool_parser="x")


def test_what_is_given_to_the_template_holds_in_bridges(tmp_path: Path) -> None:
    """Qwen3 without thinking: its template takes the empty thinking of the past away."""
    chat = {"given": {"enable_thinking": False}, "system": "Be brief."}
    completion = f"{HERMES_CALL}<|im_end|>"
    talk = Talk(tmp_path, FORMATS["qwen3"], completion, chat=chat)
    head = text_of(talk.tokenizer, talk.first)
    assert head.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "Be brief." in head
    assert talk.renderer.name == "template"
    assert talk.bridge(said(talk.reply)) is None
    named = Talk(tmp_path / "b", FORMATS["qwen3"], completion, chat=chat, name="qwen3")
    delta = text_of(named.tokenizer, named.bridge(said(named.reply)).token_ids)
    assert delta == FORMATS["qwen3"].tool_delta + "<think>\n\n</think>\n\n"


def test_a_template_of_a_file_is_the_one_that_is_compared(tmp_path: Path) -> None:
    form = FORMATS["qwen3"]
    talk = Talk(
        tmp_path, form, chat={"template": template("qwen3").replace("# Tools", "# Functions")}
    )
    assert talk.renderer.name == "template"


def test_tools_are_refused_where_the_template_reads_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the chat template reads no tools"):
        tokenizer(tmp_path, PLAIN["chatml"], tools=(TOOL,))


def test_a_template_that_refuses_a_message_is_not_gone_on_with(tmp_path: Path) -> None:
    talk = Talk(tmp_path, FORMATS["gpt-oss"], FORMATS["gpt-oss"].final)
    assert talk.bridge([{"role": "tool", "name": "add", "content": "4"}]) is None
