"""Session serves the requests that the agent of one rollout makes, and builds the rollout's
trajectories from the completions.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from rftmega.core.errors import ContextTooLong, DataError
from rftmega.core.interfaces import Model
from rftmega.core.types import Completion, Sampling, Trajectory, Turn
from rftmega.data.chat.conversation import Conversation, GrowingTrajectory
from rftmega.data.chat.renderer import ConversationRenderer
from rftmega.data.chat.replies import Messages, text_of
from rftmega.environments.agents.protocol import (
    Asked,
    RequestRefused,
    Said,
    Tokens,
    check_sampling,
    same,
)


class _Line:
    """_Line is a conversation with the model, together with its chat messages as the agent sends
    them, by which later requests are recognised as continuing it.
    """

    def __init__(self, conversation: Conversation, messages: Messages):
        self.conversation, self.messages = conversation, messages
        self.busy = True  # a completion is being generated


class Session:
    """Session holds the conversations between an agent and the model in one rollout.

    A request that repeats a conversation and adds messages extends the conversation's trajectory
    without changing a token. Any other request begins a new trajectory. `ask_from_outside` is
    called in the endpoint's thread, all other methods in the event loop of the rollouts.
    """

    def __init__(self, model: Model, renderer: ConversationRenderer):
        self.model, self.renderer = model, renderer
        self.sampling: Sampling = model.sampling
        self.requests = 0
        self.responses: dict[str, Messages] = {}  # response id -> messages up to it
        self._lines: list[_Line] = []
        self._segments: list[GrowingTrajectory] = []  # of token requests
        self._order: list[_Line | GrowingTrajectory] = []
        self._loop = asyncio.get_running_loop()

    async def ask_from_outside(self, body: Mapping[str, Any], asked: Asked | Tokens) -> Any:
        """Serves a request that arrives in the event loop of another thread. Returns Said for a
        chat request, a Completion for a token request.

        `body`: the object with the request's sampling parameters; `asked`: the parsed request.
        Raises RequestRefused if the request can't be served.
        """
        work: Coroutine[Any, Any, Said | Completion] = (
            self.continued(body, asked)
            if isinstance(asked, Tokens)
            else self.completion(body, asked)
        )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wrap_future(future)

    async def completion(self, body: Mapping[str, Any], asked: Asked) -> Said:
        """Generates the completion for a request in chat messages, and adds it to the conversation
        that the request continues or begins.

        `body` holds the sampling parameters, `asked` the messages. Raises RequestRefused if the
        request can't be served.
        """
        check_sampling(body, self.sampling)
        line = self._line_of(asked)
        context = line.conversation.context
        try:
            completion = await self._generated(context, asked.max_tokens)
        except BaseException:
            self._lines.remove(line)  # later requests must not continue a failed one
            raise
        reply = line.conversation.answered(completion)
        pieces = [text_of(self.renderer.tokenizer, [each]) for each in completion.token_ids]
        said = Said(reply, completion, len(context), pieces)
        line.messages = [*asked.messages, said.message()]
        line.busy = False
        return said

    async def continued(self, params: Mapping[str, Any], asked: Tokens) -> Completion:
        """Generates the completion for a request in token ids, and adds it to the trajectory that
        the request's token ids extend, or to a new one.

        `params` holds the sampling parameters, `asked` the token ids. Raises RequestRefused if the
        request can't be served.
        """
        check_sampling(params, self.sampling)
        token_ids = asked.token_ids
        fitting = [each for each in self._segments if _begins(token_ids, each)]
        completion = await self._generated(token_ids, asked.max_tokens)
        # a concurrent request may have extended a segment meanwhile
        known = [each for each in fitting if _begins(token_ids, each)]
        if known:
            segment = max(known, key=lambda each: each.length)
            segment.add(token_ids[segment.length :], [])
        else:
            segment = GrowingTrajectory([token_ids], len(token_ids))
            self._segments.append(segment)
            self._order.append(segment)
        segment.add(completion, [Turn("assistant", 0, len(completion.token_ids))])
        return completion

    def trajectories(self) -> list[Trajectory]:
        """Returns the rollout's trajectories in the order in which they began."""
        found: list[Trajectory] = []
        for each in self._order:
            if isinstance(each, _Line):
                found += each.conversation.trajectories()
            elif (one := each.trajectory()) is not None:
                found.append(one)
        return found

    @property
    def turns(self) -> int:
        """Returns the number of completions in the rollout."""
        completions = [each.conversation.turns for each in self._order if isinstance(each, _Line)]
        return sum(completions) + sum(len(each.turns) for each in self._segments)

    @property
    def control_tokens(self) -> int:
        """Returns how often the agent's messages contain the text of a control token, such as
        <|im_end|>; these were tokenized as plain text.
        """
        lines = [each for each in self._order if isinstance(each, _Line)]
        return sum(each.conversation.control_tokens for each in lines)

    async def _generated(self, context: Sequence[int], most: int | None) -> Completion:
        self.requests += 1
        most = None if most is None else min(most, self.model.row_tokens)
        try:
            return await self.model.generate(context, max_tokens=most)
        except ContextTooLong as error:
            raise RequestRefused(str(error), code="context_length_exceeded") from error

    def _line_of(self, asked: Asked) -> _Line:
        """Returns the conversation that the request `asked` continues, or a new one if it continues
        none.
        """
        for line in sorted(self._lines, key=lambda each: -len(each.messages)):
            size = len(line.messages)
            new = asked.messages[size:]
            known = zip(line.messages, asked.messages, strict=False)
            if (
                not line.busy
                and new
                and line.conversation.tools == asked.tools
                and all(message["role"] != "assistant" for message in new)
                and all(same(one, other) for one, other in known)
            ):
                line.busy = True
                self._say(line.conversation, new)
                return line
        return self._begun(asked)

    def _say(self, conversation: Conversation, messages: Messages) -> None:
        try:
            conversation.reply(messages)
        except DataError as error:
            raise RequestRefused(str(error)) from error

    def _begun(self, asked: Asked) -> _Line:
        control = self.renderer.tokenizer.control
        hidden = [
            control.hidden(each, words=each["role"] != "assistant") for each in asked.messages
        ]
        try:
            ids = self.renderer.render(hidden, asked.tools)
        except DataError as error:
            raise RequestRefused(str(error)) from error
        conversation = Conversation(ids, self.renderer, asked.tools, messages=hidden)
        conversation.control_tokens = len(control.found(asked.messages, words=True))
        line = _Line(conversation, list(asked.messages))
        self._lines.append(line)
        self._order.append(line)
        return line


def _begins(token_ids: Sequence[int], segment: GrowingTrajectory) -> bool:
    """Returns whether `token_ids`, the context of a request, begin with all tokens of the
    trajectory `segment` and add further tokens.
    """
    known = segment.ids()
    return len(known) < len(token_ids) and tuple(token_ids[: len(known)]) == known
