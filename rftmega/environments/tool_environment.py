"""ToolsEnvironment runs multi-turn rollouts with tool calls."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rftmega.config.options.environments import Tools
from rftmega.config.options.parts import implements
from rftmega.core.errors import ContextTooLong, DataError
from rftmega.core.interfaces import Model
from rftmega.core.types import Prompt, Rollout
from rftmega.data.chat.conversation import Conversation
from rftmega.data.chat.renderer import ConversationRenderer
from rftmega.data.chat.replies import Reply, Specs, ToolCall
from rftmega.environments.tools.create import toolsets_of
from rftmega.environments.tools.tool_runner import OpenTools, ToolRunner

LIMITS = ("turns", "tokens", "tool_seconds")  # limits that a rollout may exceed


@implements(Tools)
class ToolsEnvironment:
    """ToolsEnvironment generates a completion, runs its tool calls, and generates the next
    completion after the tools' replies, until a completion has no calls or a limit is reached.
    """

    def __init__(self, options: Tools, tokenizer: Any):
        """`tokenizer`: a data.Tokenizer whose chat template renders the function specs that `specs`
        returns.
        """
        self.options = options
        self.tools = OpenTools(toolsets_of(options), options.limits)
        self.renderer = ConversationRenderer.of(
            tokenizer, options.renderer, tool_parser=options.tool_parser
        )
        self.stop_ids: Sequence[int] = self.renderer.stop_ids
        # the last task whose tokens were checked against the chat template: samples of one prompt
        # arrive together
        self._known: tuple[str, tuple[int, ...]] | None = None

    @staticmethod
    def specs(options: Tools) -> list[dict[str, Any]]:
        """Returns the function specs of the tools in OpenAI's format.

        Raises ConfigError if the options name no tool, InfrastructureFault if a tool server can't
        be reached.
        """
        return asyncio.run(_listed(options))

    def check(self, task: Prompt) -> None:
        """Raises DataError for a task whose token ids differ from the chat template's rendering of
        its messages and the tools.
        """
        Conversation.of(task, self.renderer, self.renderer.tokenizer.chat.tools)

    async def run(self, task: Prompt, model: Model) -> Rollout:
        specs = [spec.openai() for spec in await self.tools.open()]
        conversation = self._begun(task, specs)
        async with self.tools.runner(task) as runner:
            over = await self._converse(conversation, runner, model)
            rewards = await runner.rewards()
        measures = runner.measures | {"turns": float(conversation.turns)}
        measures |= {f"over_{limit}": float(limit == over) for limit in LIMITS}
        measures["control_tokens"] = float(conversation.control_tokens)
        trajectories = conversation.trajectories()
        if len(trajectories) > 1:
            measures["rewritten"] = len(trajectories) - 1.0
        if over:
            trajectories[-1] = replace(trajectories[-1], truncated=True)
        return self._limited(Rollout(tuple(trajectories), rewards=rewards, measures=measures), over)

    def _begun(self, task: Prompt, specs: Specs) -> Conversation:
        """Returns the conversation of a task before the first completion. `specs`: the function
        specs of the tools. Raises DataError for a task that `check` rejects.
        """
        known = task.record, task.token_ids
        checked, self._known = known == self._known, None
        found = Conversation.of(task, self.renderer, specs, checked=checked)
        self._known = known
        return found

    async def close(self) -> None:
        """Stops all servers, processes and threads of the tools."""
        await self.tools.close()

    async def _converse(self, conversation: Conversation, runner: ToolRunner, model: Model) -> str:
        """Runs all turns of a rollout: completions, tool calls and replies. Returns the limit (an
        entry of LIMITS) that ended the rollout; "" if the model ended it.
        """
        said = 0  # completion tokens so far
        while True:
            most = self._most_tokens(said)
            try:
                completion = await model.generate(conversation.context, max_tokens=most)
            except ContextTooLong:
                if not conversation.turns:
                    raise
                return "tokens"
            said += len(completion.token_ids)
            reply = conversation.answered(completion)
            if not reply.complete:
                return "tokens"
            if not reply.calls:
                return ""
            if conversation.turns == self.options.max_turns:
                return "turns"
            if runner.measures["tool_seconds"] >= self.options.limits.rollout_seconds:
                return "tool_seconds"
            replies = await asyncio.gather(*(_called(runner, call, reply) for call in reply.calls))
            _say(conversation, list(replies), reply)
            if (given := await runner.turn_reward()) is not None:
                conversation.reward(given)
            if self.options.max_tokens and said >= self.options.max_tokens:
                return "tokens"

    def _most_tokens(self, said: int) -> int | None:
        """Returns the maximum number of tokens of the next completion; None if only the context
        length limits it.

        `said`: number of tokens in the rollout's completions so far.
        """
        bounds = [bound for bound in (self.options.max_turn_tokens,) if bound]
        if self.options.max_tokens:
            bounds.append(self.options.max_tokens - said)
        return min(bounds) if bounds else None

    def _limited(self, rollout: Rollout, over: str) -> Rollout:
        """Applies the option over_limit to a rollout that exceeded the limit `over`: returns the
        rollout unchanged, with reward 0, or marked as lost.

        `over` is "" if no limit was exceeded; the rollout is then returned unchanged.
        """
        if not over or self.options.over_limit == "learn":
            return rollout
        if self.options.over_limit == "zero":
            return replace(rollout, score_zero=True)
        return replace(rollout, lost=f"it ran over its limit of {over}")


def _say(conversation: Conversation, replies: list[dict[str, Any]], reply: Reply) -> None:
    """Adds the tools' replies to the conversation, as messages.

    If a call in the completion `reply` could not be parsed and the chat template accepts tool
    messages only after a valid call, adds the replies as user messages. Raises DataError if the
    template accepts neither.
    """
    try:
        conversation.reply(replies)
    except DataError:
        if not reply.problem:
            raise
        conversation.reply([{"role": "user", "content": each["content"]} for each in replies])


async def _called(runner: ToolRunner, call: ToolCall, reply: Reply) -> dict[str, Any]:
    """Runs one tool call of the completion `reply`. Returns a tool message with the tool's reply,
    or with the parser's error message if the call could not be parsed.
    """
    message = {"role": "tool", "name": call.name, "tool_call_id": call.id}
    if call.arguments is None:
        runner.refuse()
        return message | {"content": reply.problem}
    said = await runner.call(call.name, call.arguments)
    return message | {"content": said.text}


async def _listed(options: Tools) -> list[dict[str, Any]]:
    tools = OpenTools(toolsets_of(options), options.limits)
    try:
        return [spec.openai() for spec in await tools.open()]
    finally:
        await tools.close()
