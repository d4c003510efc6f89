"""Tokenizer converts text to token ids and back. Only this module loads a tokenizer with
transformers.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rftmega.core.errors import CheckpointError, DataError
from rftmega.core.json_files import BYTE_ORDER_MARK, read_json_object
from rftmega.data.chat.template import Chat, ChatTemplate, answered
from rftmega.data.chat.template_forms import Messages
from rftmega.data.token_texts import Pieces

Specs = Sequence[Mapping[str, Any]]  # of functions, in OpenAI's format
FILES = (
    "config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


class Tokenizer:
    """Tokenizer wraps the tokenizer of a Hugging Face model folder."""

    def __init__(
        self,
        folder: str | Path,
        *,
        trust_remote_code: bool = False,
        chat: Chat | None = None,
        control_tokens: str = "reject",
    ):
        """Loads the tokenizer of `folder`; executes Python files in it only with
        `trust_remote_code`. `chat`: options of the chat template. `control_tokens`: how
        control-token names in prompts and responses are treated, as in data.control_tokens.

        Raises CheckpointError if the folder holds no tokenizer, one that needs Python files, or one
        without an end-of-sequence token.
        """
        folder = Path(folder)
        self._chat = chat or Chat()
        fields = [_read(folder / name) for name in FILES]
        self._inner = _loaded(folder, trust_remote_code)
        self._template = ChatTemplate(self._inner, self._chat)
        self.control = self._template.control
        self._control_tokens = control_tokens
        self.named = 0  # control-token names in records, if they are permitted
        if self._chat.system:
            self._use_system(self._chat)
        self._template.refuse_unread(folder)
        self._pieces = Pieces(
            lambda ids: str(self._inner.decode(list(ids), skip_special_tokens=False))
        )
        stops = _listed(self._inner.eos_token_id) + _generation_stops(
            folder / "generation_config.json"
        )
        self.stop_ids = sorted(set(stops))
        """All token ids that end a completion: the tokenizer's end-of-sequence token and the ids in
        generation_config.json.
        """
        if not self.stop_ids:
            raise CheckpointError(
                f"The tokenizer in {folder} names no eos_token, so no completion could ever stop."
            )
        self._end = stops[0]
        self._vocabulary: int | None = _vocabulary(fields[0])
        if self._vocabulary is not None and (reason := self._stranger(self.stop_ids)):
            raise CheckpointError(f"{folder}: no completion could end as it should: {reason}")

    def encode(
        self,
        prompt: str | Messages,
        *,
        chat_template: bool,
        placeholders: Collection[str] = (),
        tools: Specs | None = None,
    ) -> tuple[int, ...]:
        """Returns the token ids of a prompt.

        Chat messages always go through the chat template, strings only if `chat_template` is set.
        `placeholders`: names of control tokens that stand for media and are permitted in a prompt.
        `tools`: function specs for the chat template; None: the run's.

        Raises DataError for an id outside the model's vocabulary, and for control tokens in the
        prompt if the run rejects them.
        """
        prompt = self._given(prompt, placeholders)
        if self._plain(prompt, chat_template):
            assert isinstance(prompt, str)
            return self._known(self.control.encode(prompt, add_special_tokens=True))
        return self.encode_reply(self._template.text(messages_of(prompt), open_=True, tools=tools))

    def encode_said(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of text from a tool or an environment; control-token names in it
        are encoded as plain text.

        Raises DataError for an id outside the model's vocabulary.
        """
        return self.encode_reply(self.control.hidden(text, words=True))

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of rendered text within a conversation: adds no special token
        before the text, and encodes names of special tokens in the text as these tokens.

        Raises DataError for an id outside the model's vocabulary.
        """
        return self._known(self.control.encode(text))

    def recorded(self, messages: Messages) -> Messages:
        """Returns a record's messages as they were encoded: with data.control_tokens=text,
        control-token names in them are replaced by stand-ins (see ControlTokens.hidden), otherwise
        they are unchanged.
        """
        if self._control_tokens != "text":
            return messages
        hidden: Messages = self.control.hidden(messages)
        return hidden

    @property
    def inner(self) -> Any:
        """Returns the tokenizer of transformers, for libraries that need it."""
        return self._inner

    @property
    def size(self) -> int:
        """Returns the number of token ids that are in the vocabulary of both the tokenizer and the
        model.
        """
        own = len(self._inner)
        return own if self._vocabulary is None else min(own, self._vocabulary)

    @property
    def chat(self) -> Chat:
        """Returns the run's options of the chat template, such as the system message."""
        return self._chat

    @property
    def template(self) -> ChatTemplate:
        """Returns the chat template."""
        return self._template

    def encode_behind(self, before: str, text: str) -> tuple[int, ...]:
        """Returns the token ids of `text` as a continuation of `before`. Special tokens in `before`
        are written by name.

        Raises DataError for an id outside the model's vocabulary.
        """
        return self._known(self._behind(before, text, special=False))

    def encode_response(
        self,
        prompt: str | Messages,
        completion: str | dict[str, Any],
        *,
        chat_template: bool,
        placeholders: Collection[str] = (),
        tools: Specs | None = None,
    ) -> tuple[int, ...]:
        """Returns the token ids of the response `completion` (text or an assistant message) to
        `prompt`, as an engine would return them: the last one is a stop token.

        With a chat template, these are the tokens that the template writes for the assistant's
        turn, up to its end. `placeholders`: as in `encode`, for the prompt.

        Raises DataError for a template that does not continue the prompt with
        the response.
        """
        prompt = self._given(prompt, placeholders, counted=False)
        completion = self._given(completion)
        if self._plain(prompt, chat_template):
            assert isinstance(prompt, str)
            if not isinstance(completion, str):
                raise DataError(
                    "the answer has calls, thinking or parts, which a chat template writes, and this prompt is a string, which "
                    "does not go through it. Set data.chat_template=true, or give messages."
                )
            return self._known((*self._behind(prompt, completion, special=True), self._end))
        messages = messages_of(prompt)
        before = self._template.text(messages, open_=True, tools=tools)
        whole = self._template.text(answered(messages, completion), open_=False, tools=tools)
        if not whole.startswith(before):
            raise DataError(
                "the tokenizer's chat template does not go on with the answer where it ends the prompt."
            )
        ids = self._behind(before, whole[len(before) :], special=False)
        for last in (place for place in reversed(range(len(ids))) if ids[place] in self.stop_ids):
            # many templates write a line feed after the end
            if not self.decode(ids[last + 1 :]).strip():
                return self._known(ids[: last + 1])
            break
        return self._known((*ids, self._end))

    def _plain(self, prompt: str | Messages, chat_template: bool) -> bool:
        """Returns whether a prompt is a string that is encoded without the chat template.

        Raises DataError if options of the chat template are set, which would have no effect on this
        prompt.
        """
        if not isinstance(prompt, str) or chat_template:
            return False
        if self._chat != Chat():
            raise DataError(
                "data.system_prompt, chat_template_file, chat_template_kwargs and tools are of the chat template, and this "
                "prompt is a string, which does not go through it. Set data.chat_template=true, or give messages."
            )
        return True

    def _given(
        self, value: Any, placeholders: Collection[str] = (), *, counted: bool = True
    ) -> Any:
        """Returns `value`, text or messages of a record, with control-token names treated as
        data.control_tokens says. `placeholders`: names that are permitted. `counted`: whether the
        names found are added to the counter `named`.

        Raises DataError if data.control_tokens rejects the names.
        """
        found = [name for name in self.control.found(value) if name not in placeholders]
        if not found:
            return value
        if self._control_tokens != "reject":
            self.named += len(found) if counted else 0
        if self._control_tokens == "control":
            return value
        if self._control_tokens == "text":
            return self.control.hidden(value, but=placeholders)
        names = ", ".join(dict.fromkeys(found))
        raise DataError(
            f"the text has {names}, which the model reads as a control token ({len(found)} in all): it could end a turn or begin "
            "another. Set data.control_tokens=text to have it read as letters, data.control_tokens=control where it is meant, "
            "or take it out."
        )

    def _use_system(self, chat: Chat) -> None:
        """Sets the run's system message, with control-token names treated as in the data."""
        try:
            system = self._given(chat.system)
        except DataError as error:
            raise DataError(f"data.system_prompt: {error}") from error
        self._chat = replace(chat, system=system)
        self._template = ChatTemplate(self._inner, self._chat)

    def _known(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Returns `ids` after checking them against the model's vocabulary.

        Raises DataError for an id outside the vocabulary.
        """
        if self._vocabulary is not None and max(ids, default=0) >= self._vocabulary:
            raise DataError(f"{self._stranger(ids)}")
        return tuple(ids)

    def _stranger(self, ids: Sequence[int]) -> str | None:
        """Returns an error message about the first of `ids` that is outside the model's vocabulary;
        None if all ids are in the vocabulary.
        """
        assert self._vocabulary is not None
        for number in ids:
            if number >= self._vocabulary:
                return (
                    f"the tokenizer gives {self._inner.convert_ids_to_tokens(number)!r} the id {number}, but the model knows "
                    f"{self._vocabulary} tokens (vocab_size in config.json). Take its own tokenizer, or enlarge its embedding."
                )
        return None

    def _behind(self, before: str, after: str, *, special: bool) -> list[int]:
        """Returns the token ids of `after` as a continuation of `before`: encodes both together and
        removes the ids of `before`, since some tokenizers add a space to a text encoded alone.
        Encodes `after` alone if the ids of both together do not begin with those of `before`.
        `special`: whether special tokens such as BOS are added at the start.
        """
        prompt, whole = (
            self.control.encode(text, add_special_tokens=special)
            for text in (before, before + after)
        )
        if whole[: len(prompt)] == prompt:
            return whole[len(prompt) :]
        return self.control.encode(after)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a completion, without special tokens."""
        text = self._inner.decode(list(token_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token; special tokens appear by name."""
        return self._pieces(token_ids)


def messages_of(prompt: str | Messages) -> Messages:
    """Returns the messages of a prompt; a string becomes one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _loaded(folder: Path, trust_remote_code: bool) -> Any:
    """Returns the tokenizer of transformers, after encoding a short text with it.

    Raises CheckpointError if loading or encoding fails.
    """
    try:
        found = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        found.encode("a")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"The tokenizer in {folder} is Python code of its own. Read it; model.trust_remote_code=true runs it."
            ) from error
        said = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{folder} holds no tokenizer that transformers can read: {said}"
        ) from error
    return found


def _read(path: Path) -> dict[str, Any]:
    """Returns the content of one of the folder's JSON files, which transformers will read as well;
    empty if the file does not exist.

    Raises CheckpointError if transformers could not read the file.
    """
    if not os.path.lexists(path):
        return {}
    fields = read_json_object(path)
    with path.open("rb") as file:
        if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK:
            raise CheckpointError(
                f"{path} begins with a byte-order mark, which transformers can't read. Save it as plain UTF-8."
            )
    if path.name == "config.json" and not _is_id(size := _vocabulary(fields, 0)):
        raise CheckpointError(f"{path}: vocab_size={str(size)[:40]} is no whole number.")
    return fields


def _vocabulary(config: dict[str, Any], otherwise: Any = None) -> Any:
    """Returns vocab_size of config.json, which a vision-language model has in text_config;
    `otherwise` if there is none.
    """
    text = config.get("text_config")
    nested = text if isinstance(text, dict) else {}
    return config.get("vocab_size", nested.get("vocab_size", otherwise))


def _generation_stops(path: Path) -> list[int]:
    """Returns the ids of the tokens that end a completion according to generation_config.json.

    Raises CheckpointError for invalid ids.
    """
    said = read_json_object(path).get("eos_token_id") if os.path.lexists(path) else None
    stops = _listed(said)
    if not all(map(_is_id, stops)):
        raise CheckpointError(
            f"{path}: eos_token_id={str(said)[:80]} is neither a token's id nor a list of them."
        )
    return stops


def _listed(ids: Any) -> list[Any]:
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
