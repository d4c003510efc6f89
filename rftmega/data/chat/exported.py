"""MessageExporter converts the trajectories in a file back into messages in the format of OpenAI's
chat API.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rftmega.core.errors import DataError
from rftmega.core.types import Turn
from rftmega.data.chat.read_back import alike, read_back
from rftmega.data.chat.renderer import ConversationRenderer
from rftmega.data.chat.replies import ChatTokenizer, Messages, Specs, ToolCall, text_of
from rftmega.data.chat.template_bridge import REASONING_KEYS

COPIED = ("step", "group", "index", "rollout", "trajectory", "trajectories", "reward", "reward_parts")  # fmt: skip
SPOKEN_TO = ("tool", "user", "system")  # roles that a chat template may know
USER = {"role": "user"}
SYSTEM = {"role": "system"}
Row = Mapping[str, Any]


@dataclass(slots=True)
class _Talk:
    """The conversation of a rollout as far as MessageExporter has read it. Messages have the fields
    that the chat template reads.
    """

    messages: Messages
    context: tuple[int, ...]  # all tokens before the last completion
    completion: tuple[int, ...] = ()
    calls: tuple[ToolCall, ...] = ()  # of the last completion
    called: int = 0  # number of calls in all completions
    rewards: dict[int, float] = field(default_factory=dict)  # of completions, by message index


class MessageExporter:
    """MessageExporter converts rows of a trajectory file back into messages; it must get the rows
    in the file's order.

    The policy's messages are parsed from its completions. All other messages are recovered from the
    text of their tokens such that, if possible, the chat template renders them to the same tokens.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, renderer: ConversationRenderer | None, tools: Specs = ()
    ):
        """`renderer`: None for a tokenizer without a chat template. `tools`: function specs of the
        run.
        """
        self.tokenizer, self.renderer, self.tools = tokenizer, renderer, list(tools)
        self._last: tuple[Any, _Talk] | None = None  # a rollout, and its conversation so far

    def exported(self, row: Row) -> dict[str, Any]:
        """Returns a row of the trajectory file as a JSON object with its messages and these fields:

        "weights" has a number for each message: 1 for the policy's messages in this trajectory, 0
        for all others. "turn_rewards" is present if the environment rewarded turns. "exact" is
        whether the chat template renders the messages to the trajectory's tokens.
        """
        talk = self._read(row)
        numbers = range(len(talk.messages))
        found: dict[str, Any] = {"messages": [in_openais_fields(each) for each in talk.messages]}
        if self.tools:
            found["tools"] = self.tools
        found |= {name: row[name] for name in COPIED if name in row}
        found["weights"] = [int(number in talk.rewards) for number in numbers]
        if any(talk.rewards.values()):
            found["turn_rewards"] = [talk.rewards.get(number, 0.0) for number in numbers]
        return found | {"exact": self._is_exact(row, talk.messages)}

    def _read(self, row: Row) -> _Talk:
        """Returns the conversation of a row: of its trajectory and the earlier trajectories of the
        same rollout.
        """
        rollout = (row["step"], row["group"], row.get("rollout"))
        goes_on = row.get("trajectory") and self._last and self._last[0] == rollout
        talk = self._begun(row, self._last[1] if goes_on and self._last else None)
        ids, said = row["tokens"]["id"], 0
        given: list[Turn] = []
        for turn in turns_of(row):
            if turn.role != "assistant":
                given.append(turn)
                continue
            self._reply(talk, row, given, range(said, turn.start))
            self._completion(talk, ids[turn.start : turn.stop], turn.reward)
            said, given = turn.stop, []
        self._reply(talk, row, given, range(said, len(ids)))
        self._last = (rollout, talk)
        return talk

    def _begun(self, row: Row, before: _Talk | None) -> _Talk:
        """Returns the conversation of a row up to its first completion.

        `before`: the conversation of the rollout's previous trajectory, whose text the chat
        template has rewritten; None for the first trajectory.
        """
        prompt: str = row["prompt"]
        ids, called = self.tokenizer.encode_reply(prompt), before.called if before else 0
        for known, unknown in _beginnings(row, before):
            if self.renderer is None:
                break
            if messages := read_back(self._text, known, unknown, prompt):
                return _Talk(self._with_system(messages), ids, called=called)
        return _Talk(self._without_template(row), ids, called=called)

    def _without_template(self, row: Row) -> Messages:
        """Returns the messages of a prompt that the chat template can't reproduce: the recorded
        messages if they are a single message with the prompt's text, or the row has images;
        otherwise one user message with the prompt's text.
        """
        text = row["prompt"].removeprefix(self.tokenizer.inner.bos_token or "")
        known = row.get("messages", [])
        plain = len(known) == 1 and known[0].get("content") == text
        if known and (plain or row.get("images")):  # the prompt has a placeholder for an image
            return list(known)
        return [USER | {"content": text}]

    def _completion(self, talk: _Talk, ids: Sequence[int], reward: float) -> None:
        """Adds a completion with the token ids `ids` and its turn reward to the conversation
        `talk`, as an assistant message.
        """
        talk.rewards[len(talk.messages)] = reward
        talk.completion = tuple(ids)
        if self.renderer is None:
            text = self.tokenizer.inner.decode(list(ids), skip_special_tokens=True)
            talk.messages.append({"role": "assistant", "content": text})
            return
        reply = self.renderer.parse(talk.context, ids, self.tools, first=talk.called)
        talk.calls = reply.calls
        talk.called += len(reply.calls)
        talk.messages.append(self.renderer.message(reply))

    def _reply(self, talk: _Talk, row: Row, turns: Sequence[Turn], place: range) -> None:
        """Adds the messages that follow the last completion to the conversation `talk`. `turns`:
        the turns that the row records for these messages, empty if none; `place`: the range of
        their tokens in the row.
        """
        between = tuple(row["tokens"]["id"][place.start : place.stop])
        if turns:
            talk.messages += self._told(talk, row, turns, between)
        elif between:
            talk.messages += self._untold(talk, row, place)
        talk.context = (*talk.context, *talk.completion, *between)
        talk.completion = ()

    def _told(
        self, talk: _Talk, row: Row, turns: Sequence[Turn], between: tuple[int, ...]
    ) -> Messages:
        """Returns the messages of `turns`, the recorded turns after the last completion of the
        conversation `talk`. Their contents are chosen such that the chat template renders the
        messages to the tokens `between`, if possible.
        """
        ids = row["tokens"]["id"]
        heads = _heads(turns, talk.calls)
        written = [text_of(self.tokenizer, ids[turn.start : turn.stop]) for turn in turns]
        known = all(turn.role in SPOKEN_TO for turn in turns)
        for contents in alike(written) if known and self.renderer else ():
            said = _filled(heads, contents)
            if self._between(talk, said) == between:
                return said
        return _filled(heads, written)

    def _untold(self, talk: _Talk, row: Row, place: range) -> Messages:
        """Returns the messages after the last completion of the conversation `talk`, in the token
        range `place` of a row without recorded turns: parsed with the chat template, or else one
        user message with all the text.
        """
        ids = row["tokens"]["id"]
        text = row["prompt"] + text_of(self.tokenizer, ids[: place.stop])
        for unknown in _replies(talk) if self.renderer else ():
            if messages := read_back(self._text, talk.messages, unknown, text):
                return messages[len(talk.messages) :]
        return [USER | {"content": text_of(self.tokenizer, ids[place.start : place.stop])}]

    def _between(self, talk: _Talk, messages: Messages) -> tuple[int, ...] | None:
        """Returns the token ids between the last completion of the conversation `talk` and the next
        one, if `messages` reply to the last completion; None if the chat template rewrites earlier
        text.
        """
        assert self.renderer is not None
        hidden: Messages = self.tokenizer.control.hidden(messages, words=True)  # as in the run
        bridge = self.renderer.bridge(
            talk.context, talk.completion, hidden, self.tools, history=talk.messages
        )
        return bridge.token_ids if bridge else None

    def _is_exact(self, row: Row, messages: Messages) -> bool:
        """Returns whether the chat template renders the messages to the row's tokens."""
        if self.renderer is None:
            return False
        ids = (*self.tokenizer.encode_reply(row["prompt"]), *row["tokens"]["id"])
        if ids and ids[-1] in self.renderer.ends:  # some templates write it with the next message
            ids = ids[:-1]
        try:
            text = self.tokenizer.template.text(messages, open_=False, tools=self.tools)
            return self.tokenizer.encode_reply(text)[: len(ids)] == ids
        except DataError:
            return False

    def _text(self, messages: Messages) -> str:
        return self.tokenizer.template.text(messages, open_=True, tools=self.tools)

    def _with_system(self, messages: Messages) -> Messages:
        """Returns messages with the run's system prompt before them, unless they begin with one."""
        system = self.tokenizer.chat.system
        if not system or messages[0].get("role") == "system":
            return list(messages)
        return [SYSTEM | {"content": system}, *messages]


def turns_of(row: Row) -> list[Turn]:
    """Returns the turns (messages with their token ranges) that a row records. If the row records
    none, returns each sequence of adjacent sampled tokens as an assistant turn.
    """
    ids = row["tokens"]["id"]
    if row.get("turns"):
        turns = [
            Turn(each["role"], each["start"], each["stop"], each["name"], each["reward"] or 0.0)
            for each in row["turns"]
        ]
        return sorted(turns, key=lambda turn: turn.start)
    found, place = [], 0
    for chosen, run in groupby(row["tokens"].get("chosen", [True] * len(ids))):
        size = len(list(run))
        if chosen:
            found.append(Turn("assistant", place, place + size))
        place += size
    return found or [Turn("assistant", 0, 0)]


def in_openais_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message in OpenAI's format: reasoning under "reasoning_content", and arguments of
    calls as JSON text.
    """
    found = {name: value for name, value in message.items() if name not in REASONING_KEYS}
    thinking = [message[key] for key in REASONING_KEYS if message.get(key)]
    if thinking:
        found["reasoning_content"] = thinking[0]
    if message.get("tool_calls"):
        found["tool_calls"] = [_in_openais_fields(call) for call in message["tool_calls"]]
    return found


def _in_openais_fields(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": function}


def _beginnings(row: Row, before: _Talk | None) -> list[tuple[Messages, Messages]]:
    """Returns candidates (known, unknown) for the messages at the beginning of a row, likeliest
    first: known messages, followed by messages of which only the role is known. `before`: the
    conversation in the rollout's previous trajectory, or None.
    """
    ways: list[tuple[Messages, Messages]] = []
    if before:
        ways += [(before.messages, said) for said in _replies(before)]
    if row.get("messages"):
        ways.append((row["messages"], []))
    return [*ways, ([], [USER]), ([], [SYSTEM, USER])]


def _replies(talk: _Talk) -> list[Messages]:
    """Returns candidates for the messages that reply to the last completion of the conversation
    `talk`, without their contents.
    """
    replies = [_replying(call) for call in talk.calls]
    return [said for said in (replies, [*replies, USER], [USER]) if said]


def _replying(call: ToolCall) -> dict[str, Any]:
    return {"role": "tool", "name": call.name, "tool_call_id": call.id}


def _heads(turns: Sequence[Turn], calls: Sequence[ToolCall]) -> Messages:
    """Returns one message per turn without content: with role, name and, for tool messages, the id
    of the call in `calls` that they reply to, in order.
    """
    left = list(calls)
    heads: Messages = []
    for turn in turns:
        head: dict[str, Any] = {"role": turn.role}
        if turn.name:
            head["name"] = turn.name
        if turn.role == "tool" and left:
            head["tool_call_id"] = left.pop(0).id
        heads.append(head)
    return heads


def _filled(heads: Messages, contents: Sequence[str]) -> Messages:
    return [{**head, "content": content} for head, content in zip(heads, contents, strict=True)]
