"""Rendering of chat messages to text, with a tokenizer's chat template and the options of a run."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.data.chat.template_forms import MARK, USER, Messages, TemplateForms
from rftmega.data.chat.unrendered import Unrendered
from rftmega.data.control_tokens.names import ControlTokens, unescaped

# a block of transformers, which marks the assistant's text; plain Jinja does not know it
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
# exceptions of a template that refuses messages; its expressions are evaluated by Python
REFUSALS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    TemplateError,
)


@dataclass(frozen=True, slots=True)
class Chat:
    """Chat holds the options by which messages are rendered, besides the tokenizer's own chat
    template.
    """

    system: str = ""  # system message for conversations without one
    template: str | None = None  # instead of the tokenizer's
    given: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the template
    tools: Sequence[Mapping[str, Any]] = ()  # specs of functions, in OpenAI's format
    keep_reasoning: bool = False  # of earlier turns, though the template drops it

    @classmethod
    def of(cls, config: DataConfig, tools: Sequence[Mapping[str, Any]] = ()) -> "Chat":
        """Returns the options data.system_prompt, chat_template_file (its content) and
        chat_template_kwargs, with `tools`, the run's function specs.

        Raises DataError if the file can't be read.
        """
        template = None
        if file := config.chat_template_file:
            try:
                template = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(
                    f"data.chat_template_file={file} can't be read: {error}."
                ) from error
        return cls(
            config.system_prompt,
            template,
            config.chat_template_kwargs,
            tuple(tools),
            config.keep_reasoning,
        )


class ChatTemplate:
    """ChatTemplate renders messages with a Jinja chat template: that of data.chat_template_file if
    set, otherwise that of `inner`, a tokenizer of transformers.
    """

    def __init__(self, inner: Any, chat: Chat):
        self._inner, self._chat = inner, chat
        self.control = ControlTokens(inner, self._source_or_none)
        self.forms = TemplateForms(lambda messages: self._text(messages, (), open_=False))
        self.unrendered = Unrendered(lambda messages, open_: self.text(messages, open_=open_))

    def refuse_unread(self, folder: Path) -> None:
        """Raises DataError if options of the run or its tools have no effect because the chat
        template does not read them, and if the template of data.chat_template_file renders no
        messages. `folder`: the tokenizer's, for error messages.
        """
        if self._chat.template is not None:
            self.forms.adapted([])
        if not self._chat.given and not self._chat.tools:
            return
        names = self._names(folder)
        if self._chat.tools and "tools" not in names:
            raise DataError(
                f"{folder}: the chat template reads no tools, so the model would not know what it may call. Set "
                "data.chat_template_file to a template that reads them, or take a model that was made for tools."
            )
        if strangers := sorted(self._chat.given.keys() - names):
            near = difflib.get_close_matches(strangers[0], names, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise DataError(
                f"data.chat_template_kwargs: the chat template reads no {strangers[0]}.{hint}"
            )

    def with_system(self, messages: Messages) -> Messages:
        """Returns messages preceded by the run's system message, unless they already begin with a
        system message.
        """
        system = self._chat.system
        first = messages[0] if messages else None
        if not system or (isinstance(first, dict) and first.get("role") == "system"):
            return messages
        return [{"role": "system", "content": system}, *messages]

    def text(
        self,
        messages: Messages,
        *,
        open_: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the text of messages. `open_`: the text ends where a completion begins, at the
        beginning of the assistant's next turn, or, if the last message is the assistant's, at the
        end of its text.

        `tools`: function specs; None: the run's. Raises DataError for messages that the template
        refuses.
        """
        chosen = self._chat.tools if tools is None else tools
        return self._text(self.forms.adapted(messages), chosen, open_=open_)

    def _text(self, messages: Messages, tools: Sequence[Mapping[str, Any]], *, open_: bool) -> str:
        """Returns the text of messages that are already in the template's format; see `text`."""
        chat = self._chat
        specs = [self.control.hidden(dict(each), words=True) for each in tools]
        goes_on = open_ and ends_in_text(messages)
        try:
            text = self._inner.apply_chat_template(
                self.with_system(messages),
                tools=specs or None,
                chat_template=chat.template,
                tokenize=False,
                add_generation_prompt=open_ and not goes_on,
                continue_final_message=goes_on,
                **chat.given,
            )
        except REFUSALS as error:
            raise DataError(f"the tokenizer's chat template can't take it: {error}") from error
        assert isinstance(text, str)
        return unescaped(text)

    @cached_property
    def reads_tools(self) -> bool:
        """Returns whether the template renders function specs."""
        spec = {"name": MARK, "description": "", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": spec}]
        try:
            return MARK in self.text([USER], open_=True, tools=tools)
        except DataError:
            return False

    def source(self) -> str:
        """Returns the template's source. Raises ValueError if the tokenizer has none."""
        tools = [dict(each) for each in self._chat.tools] or None
        source = self._inner.get_chat_template(self._chat.template, tools=tools)
        assert isinstance(source, str)
        return source

    def _source_or_none(self) -> str:
        try:
            return self.source()
        except ValueError:
            return ""

    def roles(self) -> frozenset[str]:
        """Returns all strings that the template compares with, which include the names of its
        roles. Empty if the template can't be parsed.
        """
        return self._words

    @cached_property
    def _words(self) -> frozenset[str]:
        try:
            compared = self._parsed().find_all(nodes.Compare)
        except (ValueError, TemplateError):
            return frozenset()
        words = [word.value for each in compared for word in each.find_all(nodes.Const)]
        return frozenset(word for word in words if isinstance(word, str) and word)

    def _parsed(self) -> nodes.Template:
        """Returns the template's syntax tree. Raises ValueError if there is no template,
        TemplateError if its syntax is invalid.
        """
        source = GENERATION.sub("", self.source())
        return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)

    def _names(self, folder: Path) -> set[str]:
        """Returns the names of the variables that the template reads. Raises DataError if the
        template can't be parsed. `folder`: the tokenizer's, for error messages.
        """
        try:
            return meta.find_undeclared_variables(self._parsed())
        except (ValueError, TemplateError) as error:
            raise DataError(f"{folder}: the chat template can't be read: {error}") from error


def ends_in_text(messages: Messages) -> bool:
    """Returns whether the last message is the assistant's and is text without calls, so that a
    completion continues it.
    """
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    return (
        last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")
    )


def answered(messages: Messages, completion: str | dict[str, Any]) -> Messages:
    """Returns `messages` with the assistant's response `completion` (text or a message) appended.

    If the messages end in text of the assistant, the response is joined to that text.
    """
    message = (
        {"role": "assistant", "content": completion} if isinstance(completion, str) else completion
    )
    if not ends_in_text(messages):
        return [*messages, message]
    first, second = messages[-1]["content"], message["content"]
    if isinstance(first, str) and isinstance(second, str):
        return [*messages[:-1], {**message, "content": first + second}]
    parts = [
        part
        for said in (first, second)
        for part in ([{"type": "text", "text": said}] if isinstance(said, str) else said)
    ]
    return [*messages[:-1], {**message, "content": parts}]
