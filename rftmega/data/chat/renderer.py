"""ConversationRenderer parses completions and tokenizes the messages that follow them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rftmega.data.chat.completion_parsers import (
    Call,
    Parsed,
    Parser,
    SampledCompletion,
    parser_for,
    unread,
)
from rftmega.data.chat.library_renderer import LibraryRenderer, library_renderer
from rftmega.data.chat.replies import (
    UNREAD,
    Bridge,
    ChatTokenizer,
    Messages,
    Reply,
    Specs,
    ToolCall,
)
from rftmega.data.chat.template_bridge import TemplateBridge

__all__ = ["Bridge", "ConversationRenderer", "Reply", "ToolCall"]


@dataclass(frozen=True, slots=True)
class ConversationRenderer:
    """ConversationRenderer converts between messages and tokens in the chat format of one model
    folder.

    It never tokenizes sampled tokens again. It uses a renderer of the renderers library if one
    reproduces the folder's chat template, and otherwise the template itself.
    """

    tokenizer: ChatTokenizer
    library: LibraryRenderer | None
    by_template: TemplateBridge
    parser: Parser

    @classmethod
    def of(
        cls, tokenizer: ChatTokenizer, name: str = "auto", *, tool_parser: str = "auto"
    ) -> "ConversationRenderer":
        """Returns the renderer for the chat format of a tokenizer's folder.

        `name`: "auto", "template", or a renderer of the library. `tool_parser`: the format of calls
        if no renderer of the library is used. Raises ConfigError for a name that is unknown or does
        not fit the model.
        """
        library = None if name == "template" else library_renderer(tokenizer, name)
        parser = parser_for(tool_parser, tokenizer.template.source())
        return cls(tokenizer, library, TemplateBridge(tokenizer), parser)

    @property
    def name(self) -> str:
        """Returns the name of the library's renderer; "template" if no renderer of the library is
        used.
        """
        return self.library.name if self.library else "template"

    @property
    def ends(self) -> set[int]:
        """Returns the ids of all tokens that end a completion in this format."""
        own = self.library.inner.get_stop_token_ids() if self.library else ()
        return {*self.by_template.ends, *own}

    @property
    def stop_ids(self) -> list[int]:
        """Returns the sorted ids of the tokens that end a completion and are not among the
        tokenizer's stop ids.
        """
        return sorted(self.ends - set(self.tokenizer.stop_ids))

    def parse(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        tools: Specs = (),
        *,
        first: int = 0,
    ) -> Reply:
        """Returns a completion split into content, reasoning and calls. `prompt_ids`: the token ids
        before the completion; `tools`: function specs. Calls without an id get one made of a
        number, counted from `first`.

        Never raises an error, whatever the model wrote: a call that can't be parsed has `arguments`
        None.
        """
        ended = bool(completion_ids) and completion_ids[-1] in self.ends
        size = len(completion_ids) - ended
        completion = SampledCompletion(prompt_ids, list(completion_ids[:size]), ended)
        parsed = self._parsed(completion, list(completion_ids[size:]), tools)
        calls = tuple(_numbered(call, first + at) for at, call in enumerate(parsed.calls))
        return Reply(
            parsed.content,
            parsed.reasoning,
            calls,
            ended,
            UNREAD if any(call.arguments is None for call in calls) else "",
            parsed.text,
            parsed.spoken,
        )

    def _parsed(self, completion: SampledCompletion, end: Sequence[int], tools: Specs) -> Parsed:
        """Returns a completion split into content, reasoning and calls. `end`: the stop token that
        ended the completion, or empty. If the library fails to parse the completion, the result has
        at least one call whose `arguments` is None.
        """
        if not self.library:
            return self.parser(self.tokenizer, completion)
        if (parsed := self.library.parse(self.tokenizer, completion, end, tools)) is not None:
            return parsed
        parsed = self.parser(self.tokenizer, completion)
        readable = all(call.arguments is not None for call in parsed.calls)
        return unread(self.tokenizer, completion) if readable else parsed

    def message(self, reply: Reply) -> dict[str, Any]:
        """Converts `reply`, a parsed completion, to an assistant message with the fields that the
        folder's chat template reads.
        """
        return self.by_template.message(reply)

    def render(self, messages: Messages, tools: Specs = ()) -> tuple[int, ...]:
        """Returns the token ids of a whole conversation, up to the position at which the model
        continues.

        Raises DataError for messages that the chat template refuses.
        """
        text = self.tokenizer.template.text(messages, open_=True, tools=tools)
        return self.tokenizer.encode_reply(text)

    def bridge(
        self,
        previous_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Messages,
        tools: Specs = (),
        *,
        history: Messages | None = None,
    ) -> Bridge | None:
        """Returns the token ids after a completion if `messages` reply to it; None if the template
        rewrites earlier text, so that the whole conversation must be rendered again.

        `previous_ids`: the token ids before the completion. `history`: all messages up to and
        including the completion's, as returned by `message`; None: only a renderer of the library
        is used. If the completion was truncated, the returned tokens begin with the end that the
        template would have written.
        """
        ended = bool(completion_ids) and completion_ids[-1] in self.ends
        found = None
        if self.library and ended:  # the library closes what was cut off its own way
            found = self.library.bridge(previous_ids, completion_ids, messages, tools)
        if found is None and history is not None:
            found = self.by_template.bridge(completion_ids, messages, tools, history)
        return found


def _numbered(call: Call, number: int) -> ToolCall:
    """Returns a call with the id that the model wrote, or else with an id made of `number`."""
    return ToolCall(call.name, call.arguments, call.text, call.id or f"call{number:05d}")
