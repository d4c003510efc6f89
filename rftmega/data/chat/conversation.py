"""Conversation holds one multi-turn rollout: its sampled token ids, and all its turns as messages."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rftmega.core.errors import DataError
from rftmega.core.types import Completion, Prompt, Trajectory, Turn
from rftmega.data.chat.renderer import ConversationRenderer
from rftmega.data.chat.replies import Messages, Reply, Specs


@dataclass(slots=True)
class GrowingTrajectory:
    """GrowingTrajectory is a trajectory under construction: its contexts and completions in order
    (`parts`), their number of tokens (`length`), and the token ranges of its turns.
    """

    parts: list[Sequence[int] | Completion]
    length: int
    turns: list[Turn] = field(default_factory=list)

    def ids(self) -> tuple[int, ...]:
        """Returns the token ids of all contexts and completions."""
        return tuple(token for part in self.parts for token in tokens_of(part))

    def add(self, part: Sequence[int] | Completion, turns: Sequence[Turn]) -> None:
        """Appends a context or completion. `turns`: the messages in `part`, whose token positions
        are relative to the first token of `part`.
        """
        self.turns += [
            each._replace(start=each.start + self.length, stop=each.stop + self.length)
            for each in turns
        ]
        self.parts.append(part)
        self.length += len(tokens_of(part))

    def trajectory(self) -> Trajectory | None:
        """Returns the trajectory up to the end of the last completion; None if there is no
        completion yet.
        """
        parts, length = list(self.parts), self.length
        while parts and not isinstance(parts[-1], Completion):
            length -= len(tokens_of(parts.pop()))
        turns = tuple(turn for turn in self.turns if turn.start < length)
        return Trajectory.of(*parts, turns=turns) if parts else None


class Conversation:
    """Conversation holds the messages and the trajectories of one rollout.

    Between turns only new text is tokenized. If the chat template rewrites earlier text, the
    current trajectory ends, and a new one begins whose context is the whole conversation.
    """

    def __init__(
        self,
        task_ids: Sequence[int],
        renderer: ConversationRenderer,
        tools: Specs = (),
        *,
        messages: Messages,
        images: bool = False,
    ):
        """Begins with `task_ids`, the token ids that the chat template makes of `messages` and
        `tools`. Control-token names in `messages` that are meant as plain text must have been
        replaced (see ControlTokens.hidden).

        `images`: whether the task has images, which prevent rendering the conversation again.
        """
        self.renderer, self.tools = renderer, list(tools)
        self.messages = list(messages)
        self._images = images
        self.turns = 0
        self.control_tokens = 0  # names in the environment's messages, tokenized as plain text
        self._calls = 0
        self._context: tuple[int, ...] = tuple(task_ids)
        self._segments = [GrowingTrajectory([self._context], len(self._context))]
        self._asked: tuple[int, ...] | None = None  # the context of the last completion

    @classmethod
    def of(
        cls,
        task: Prompt,
        renderer: ConversationRenderer,
        tools: Specs = (),
        *,
        checked: bool = False,
    ) -> "Conversation":
        """Begins a conversation with a task, whose record contains its messages.

        Raises DataError if the task's token ids differ from the chat template's rendering of its
        messages; `checked`: skips this comparison, which was made before.
        """
        messages, images = renderer.tokenizer.recorded(messages_of(task)), bool(task.images)
        found = cls(task.token_ids, renderer, tools, messages=messages, images=images)
        known = checked or images
        if not known and renderer.render(messages, tools) != found.context:
            raise DataError(
                f"prompt {task.index} is not what the chat template makes of its messages and the tools. Set "
                "data.chat_template=true; tokens of a task are to be made with the tools of its environment."
            )
        return found

    @property
    def context(self) -> tuple[int, ...]:
        """Returns the token ids of the current trajectory so far, which are the context of the next
        completion.
        """
        return self._context

    def answered(self, completion: Completion) -> Reply:
        """Adds the completion that the model sampled after `context`. Returns the completion split
        into content, reasoning and calls.
        """
        segment, size = self._segments[-1], len(completion.token_ids)
        segment.add(completion, [Turn("assistant", 0, size)])
        ids = tuple(completion.token_ids)
        reply = self.renderer.parse(self._context, ids, self.tools, first=self._calls)
        if completion.finish_reason == "stop":  # a stop string leaves no stop token
            reply = replace(reply, complete=True)
        self._asked, self._context = self._context, (*self._context, *ids)
        self._calls += len(reply.calls)
        self.turns += 1
        self._add_completion(self.renderer.message(reply))
        return reply

    def _add_completion(self, message: dict[str, Any]) -> None:
        """Adds the message of a completion. If the task ends with an assistant message, the first
        completion is joined to that message.
        """
        begun = self.messages[-1] if self.turns == 1 and self.messages else {}
        if begun.get("role") != "assistant":
            self.messages.append(message)
            return
        said = begun["content"]
        if isinstance(said, list):
            said = "".join(part.get("text", "") for part in said)
        self.messages[-1] = {**message, "content": said + message["content"]}

    def reply(self, messages: Messages) -> None:
        """Adds `messages`, from tools or the user, that follow the last completion. Control-token
        names in the messages are tokenized as plain text.

        Raises DataError, and changes nothing, if the template rewrites earlier text and the
        conversation can't be rendered again, because it has images or the template refuses the
        messages.
        """
        if self._asked is None:
            raise ValueError("a reply follows a completion")
        named = len(self.renderer.tokenizer.control.found(messages, words=True))
        messages = self.renderer.tokenizer.control.hidden(messages, words=True)
        completion = self._context[len(self._asked) :]
        bridge = self.renderer.bridge(
            self._asked, completion, messages, self.tools, history=self.messages
        )
        if bridge is None:
            self._begin_anew(messages)
            self.control_tokens += named
            return
        self.control_tokens += named
        self.messages += messages
        self._asked = None
        self._segments[-1].add(bridge.token_ids, bridge.turns)
        self._context += bridge.token_ids

    def reward(self, value: float) -> None:
        """Sets the reward of the last completion."""
        for segment in reversed(self._segments):
            for place in reversed(range(len(segment.turns))):
                if segment.turns[place].role == "assistant":
                    segment.turns[place] = segment.turns[place]._replace(reward=value)
                    return
        raise ValueError("there is no completion to reward")

    def trajectories(self) -> list[Trajectory]:
        """Returns the trajectories in order, each up to its last completion. Omits trajectories
        without a completion.
        """
        found = [segment.trajectory() for segment in self._segments]
        return [each for each in found if each is not None]

    def _begin_anew(self, messages: Messages) -> None:
        """Ends the current trajectory and begins a new one, whose context is the rendering of the
        whole conversation followed by `messages`.
        """
        if self._images:
            raise DataError(
                "the chat template rewrites what stands before, and a conversation with images can't be rendered anew: take "
                "a template that keeps it, or end the rollout at the first answer."
            )
        self._context = self.renderer.render([*self.messages, *messages], self.tools)
        self.messages += messages
        self._asked = None
        self._segments.append(GrowingTrajectory([self._context], len(self._context)))


def tokens_of(part: Sequence[int] | Completion) -> Sequence[int]:
    """Returns the token ids of `part`, a context or a completion."""
    return part.token_ids if isinstance(part, Completion) else part


def messages_of(task: Prompt) -> Messages:
    """Returns the chat messages of a task, from its record; a prompt that is a string becomes one
    user message. Raises DataError if the task has no record with its prompt.
    """
    record: dict[str, Any] = json.loads(task.record) if task.record else {}
    prompt = record.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise DataError(f"prompt {task.index} comes without its text, which a conversation needs.")
    return [dict(message) for message in prompt]
