"""Continuation of conversations with any chat template: renders the whole text, and tokenizes only
its new end.
"""

from collections.abc import Sequence
from typing import Any

from rftmega.core.errors import DataError
from rftmega.core.types import Turn
from rftmega.data.chat.replies import (
    Bridge,
    ChatTokenizer,
    Messages,
    Reply,
    Specs,
    calls_of,
    text_of,
    token_id,
)

MARK = "\ue000\ue001"  # private-use characters, which occur in no text
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# tokens that end a turn in some model family, in addition to the stop tokens in its folder
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|call|>", "<|return|>", "<|observation|>")
USER = {"role": "user", "content": "?"}


class TemplateBridge:
    """TemplateBridge continues conversations as a folder's chat template would render them.

    This requires that the text rendered so far is a prefix of the text of the longer conversation.
    A template that drops reasoning or counts messages does not satisfy this.
    """

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self.reasoning_key = self._shown_reasoning()
        call = {"name": MARK, "arguments": {}}
        self.shows_calls = MARK in self._completion_text(tool_calls=[_call(call)])
        self.ends = {*tokenizer.stop_ids, *self._further_ends()}

    def message(self, reply: Reply) -> dict[str, Any]:
        """Converts `reply`, a parsed completion, to an assistant message with the fields that the
        chat template renders. Reasoning and calls for which the template has no field stay in the
        content.
        """
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        readable = all(call.arguments is not None for call in reply.calls)
        structured = bool(reply.calls) and readable and self.shows_calls
        if structured:
            message |= {"content": reply.spoken, "tool_calls": calls_of(reply)}
        if not self.reasoning_key:
            return message
        if structured or not reply.calls:
            message["content"] = reply.content
        elif reply.reasoning:
            message["content"] = _behind_thinking(reply)
        if reply.reasoning:
            message[self.reasoning_key] = reply.reasoning
        return message

    def bridge(
        self, completion_ids: Sequence[int], messages: Messages, tools: Specs, history: Messages
    ) -> Bridge | None:
        """Returns the token ids after a completion if `messages` reply to it; None if the template
        rewrites earlier text. `tools`: function specs.

        `history`: all messages up to and including the completion's, as returned by `message`. With
        data.keep_reasoning, a template that drops the reasoning of earlier turns counts as one that
        keeps it: the tokens after the completion are those that it writes behind the turn's end.
        """
        found = self._bridge(completion_ids, messages, tools, history)
        if found is not None or not self._tokenizer.chat.keep_reasoning:
            return found
        return self._bridge(completion_ids, messages, tools, history, stable=False)

    def _bridge(
        self,
        completion_ids: Sequence[int],
        messages: Messages,
        tools: Specs,
        history: Messages,
        *,
        stable: bool = True,
    ) -> Bridge | None:
        """Returns the token ids after a completion, as `bridge` does. `stable`: whether to return
        None if the template rewrites earlier text; otherwise the earlier text is not compared.
        """
        try:
            before = self._text(history[:-1], tools, open_=True)
            whole = self._text([*history, *messages], tools, open_=True)
            places = self._places(whole, history, messages, tools)
        except DataError:  # the template refuses such a message, or refuses it here
            return None
        if stable:
            behind = self._behind(before, whole, completion_ids, history[-1], places[0][0])
        else:
            behind = self._behind_end(whole, completion_ids, places[0][0])
        if behind is None:
            return None
        anchor, start = behind
        token_ids = self._tokenizer.encode_behind(anchor, whole[start:])
        inside = [(max(0, first - start), max(0, last - start)) for first, last in places]
        spans = self._spans(anchor, whole[start:], inside, token_ids)
        turns = [
            Turn(message["role"], *span, message.get("name", ""))
            for message, span in zip(messages, spans, strict=True)
        ]
        return Bridge(token_ids, tuple(turns))

    def _text(self, messages: Messages, tools: Specs, *, open_: bool) -> str:
        return self._tokenizer.template.text(messages, open_=open_, tools=tools)

    def _behind(
        self, before: str, whole: str, completion_ids: Sequence[int], message: Any, first: int
    ) -> tuple[str, int] | None:
        """Returns (anchor, start): the text that directly precedes the new tokens, and the
        character at which the new text starts in `whole`. Returns None if `whole` does not contain
        the whole completion.

        `before`: rendering of the messages before the completion. `whole`: rendering of all
        messages, including those after it. `message`: the completion as a message. `first`: the
        character in `whole` at which the content of the first message after the completion starts.
        """
        completion = text_of(self._tokenizer, completion_ids)
        ended = bool(completion_ids) and completion_ids[-1] in self.ends
        end = text_of(self._tokenizer, completion_ids[-1:]) if ended else ""
        if whole.startswith(before + completion) and len(before + completion) <= first:
            return end or completion, len(before + completion)
        body = completion.removesuffix(end)
        if not end or end in body or not whole.startswith(before):
            return None
        # the template renders the completion differently (JSON, line feeds): it must keep all of it
        last = whole.find(end, len(before))
        if last < 0 or last + len(end) > first or not _kept(message, whole[len(before) : last]):
            return None
        return end, last + len(end)

    def _behind_end(
        self, whole: str, completion_ids: Sequence[int], first: int
    ) -> tuple[str, int] | None:
        """Returns (anchor, start) as `_behind` does: behind the last end of a turn before the
        character `first`. Returns None for a completion without an end.
        """
        if not completion_ids or completion_ids[-1] not in self.ends:
            return None
        end = text_of(self._tokenizer, completion_ids[-1:])
        last = whole.rfind(end, 0, first)
        return None if last < 0 else (end, last + len(end))

    def _places(
        self, whole: str, history: Messages, messages: Messages, tools: Specs
    ) -> list[tuple[int, int]]:
        """Returns the character range (start, stop) of the content of each of `messages` in
        `whole`, the rendering of `history` and `messages`. The ranges are found by replacing the
        content and comparing the texts.
        """
        places = []
        for number, message in enumerate(messages):
            marked = [*messages[:number], {**message, "content": MARK}, *messages[number + 1 :]]
            other = self._text([*history, *marked], tools, open_=True)
            start = _common(whole, other)
            rest = min(len(whole), len(other)) - start
            same = _common(whole[::-1][:rest], other[::-1][:rest])
            places.append((start, len(whole) - same))
        return places

    def _spans(
        self, anchor: str, text: str, places: Sequence[tuple[int, int]], ids: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Returns the token range (start, stop) of each character range in `places`. `text`: the
        text of the characters; `ids`: its token ids; `anchor`: the text before it.
        """
        inner = self._tokenizer.inner
        if inner.is_fast:
            found, offsets = self._tokenizer.control.encode_places(anchor + text)
            if found[-len(ids) :] == list(ids):
                offsets = offsets[-len(ids) :]
                moved = [(first + len(anchor), last + len(anchor)) for first, last in places]
                return [_tokens(offsets, *each) for each in moved]
        counted = [[len(self._tokenizer.encode_reply(text[:at])) for at in each] for each in places]
        return [(first, min(last, len(ids))) for first, last in counted]

    def _completion_text(self, **fields: Any) -> str:
        """Returns the text of a conversation that ends in an assistant message with these fields;
        "" if the template refuses the conversation.
        """
        completion = {"role": "assistant", "content": "", **fields}
        try:
            return self._text([USER, completion], (), open_=False)
        except DataError:
            return ""

    def _shown_reasoning(self) -> str:
        """Returns the name of the message field whose reasoning the template renders; "" if there
        is none.
        """
        calls = [_call({"name": "f", "arguments": {}})]
        for key in REASONING_KEYS:
            texts = (
                self._completion_text(content="x", **{key: MARK}),
                self._completion_text(tool_calls=calls, **{key: MARK}),
            )
            if any(MARK in text for text in texts):
                return key
        return ""

    def _further_ends(self) -> set[int]:
        """Returns the ids of those tokens in ENDS that the chat template writes at the end of turns
        or calls.
        """
        call = {"name": "f", "arguments": {"a": MARK}}
        texts = [
            self._completion_text(content=MARK),
            self._completion_text(tool_calls=[_call(call)]),
        ]
        tail = "".join(text.partition(MARK)[2] for text in texts)
        named = [name for name in ENDS if name in tail]
        found = [token_id(self._tokenizer, name) for name in named]
        return {each for each in found if each is not None}


def _call(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "id": "call00000", "function": function}


def _behind_thinking(reply: Reply) -> str:
    """Returns the text of a completion after its reasoning, including calls as the model wrote
    them.
    """
    _, closed, behind = reply.text.partition("</think>")
    if closed:
        return behind.lstrip("\n")
    return reply.content + "".join(call.text for call in reply.calls)


def _kept(message: Any, text: str) -> bool:
    """Returns whether `text`, the template's rendering of the completion `message`, contains its
    content, its reasoning and the names of its calls.
    """
    names = [each["function"]["name"] for each in message.get("tool_calls", ())]
    thinking = [message.get(key) or "" for key in REASONING_KEYS]
    said = [part.strip() for part in (message["content"], *thinking, *names)]
    return all(part in text for part in said)


def _common(one: str, other: str) -> int:
    """Returns the length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _tokens(offsets: Sequence[tuple[int, int]], start: int, stop: int) -> tuple[int, int]:
    """Returns the range of the tokens that overlap the characters [start, stop). `offsets`:
    character range of each token.
    """
    first = sum(1 for _, end in offsets if end <= start)
    if stop <= start:
        return first, first
    return first, sum(1 for begin, _ in offsets if begin < stop)
