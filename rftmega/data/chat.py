"""Turns chat messages into text, by the chat template of a tokenizer and the options of a run."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, meta

from rftmega.config import DataConfig
from rftmega.control_tokens.names import ControlTokens, unescaped
from rftmega.errors import DataError

Messages = list[dict[str, Any]]  # content: a string, or a list of parts
# a block of transformers' own, which marks what the assistant says; plain Jinja does not know it
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Chat:
    """Chat holds how messages become text, beyond the tokenizer's own chat template."""

    system: str = ""  # message before those that begin with none
    template: str | None = None  # instead of the tokenizer's
    given: Mapping[str, Any] = field(default_factory=dict)  # to the template
    tools: Sequence[Mapping[str, Any]] = ()  # specs of functions, as OpenAI's API has them

    @classmethod
    def of(cls, config: DataConfig, tools: Sequence[Mapping[str, Any]] = ()) -> "Chat":
        """Reads the options data.system_prompt, chat_template_file and chat_template_kwargs.

        Raises DataError where the file can't be read.
        """
        template = None
        if file := config.chat_template_file:
            try:
                template = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(
                    f"data.chat_template_file={file} can't be read: {error}."
                ) from error
        return cls(config.system_prompt, template, config.chat_template_kwargs, tuple(tools))


class ChatTemplate:
    """ChatTemplate puts messages through the template of transformers' tokenizer `inner`."""

    def __init__(self, inner: Any, chat: Chat):
        self._inner, self._chat = inner, chat
        self.control = ControlTokens(inner, self._source_or_none)

    def refuse_unread(self, folder: Path) -> None:
        """Raises DataError for something given to the chat template that it does not read."""
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
        """Returns messages behind the run's system message, unless they begin with one."""
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
        """Returns the text of messages; `open_`: up to where the assistant begins.

        `tools` None: those of the run. Raises DataError for messages that the template refuses.
        """
        chat = self._chat
        given = chat.tools if tools is None else tools
        specs = [self.control.hidden(dict(each), words=True) for each in given]
        try:
            text = self._inner.apply_chat_template(
                self.with_system(messages),
                tools=specs or None,
                chat_template=chat.template,
                tokenize=False,
                add_generation_prompt=open_,
                **chat.given,
            )
        except Exception as error:  # the template's own, whatever it is
            raise DataError(f"the tokenizer's chat template can't take it: {error}") from error
        assert isinstance(text, str)
        return unescaped(text)

    def source(self) -> str:
        """Returns the template itself. Raises ValueError where the tokenizer has none."""
        tools = [dict(each) for each in self._chat.tools] or None
        source = self._inner.get_chat_template(self._chat.template, tools=tools)
        assert isinstance(source, str)
        return source

    def _source_or_none(self) -> str:
        try:
            return self.source()
        except ValueError:
            return ""

    def _names(self, folder: Path) -> set[str]:
        """Returns what the template reads. Raises DataError for one that can't be read."""
        try:
            source = GENERATION.sub("", self.source())
            parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        except (ValueError, TemplateError) as error:
            raise DataError(f"{folder}: the chat template can't be read: {error}") from error
        return meta.find_undeclared_variables(parsed)
