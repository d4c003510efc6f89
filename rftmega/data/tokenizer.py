"""Text to ids and back; the only file that says `transformers` for a tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer

from rftmega.data.pieces import Pieces
from rftmega.errors import CheckpointError, DataError

Messages = list[dict[str, str]]


class Tokenizer:
    """The tokenizer of a Hugging Face folder."""

    def __init__(self, folder: str | Path, *, trust_remote_code: bool = False):
        """Python files in the folder are run only with `trust_remote_code`.

        Raises CheckpointError where the folder holds no tokenizer, one that needs them, or one without an end of sequence.
        """
        try:
            self._inner = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            if "trust_remote_code" in str(error):
                raise CheckpointError(
                    f"The tokenizer in {folder} is Python code of its own. Read it; model.trust_remote_code=true runs it."
                ) from error
            raise CheckpointError(f"{folder} holds no tokenizer that transformers can read: {error}") from error
        self._pieces = Pieces(lambda ids: str(self._inner.decode(list(ids), skip_special_tokens=False)))
        stops = _listed(self._inner.eos_token_id) + _listed(_generation_stop(Path(folder)))
        self.stop_ids = sorted(set(stops))
        """Every id that ends an answer: the tokenizer's end of sequence and those of generation_config.json."""
        if not self.stop_ids:
            raise CheckpointError(f"The tokenizer in {folder} names no eos_token, so no answer could ever stop.")
        self._end = stops[0]

    def encode(self, prompt: str | Messages, *, chat_template: bool) -> tuple[int, ...]:
        """Token ids of a prompt; chat messages always go through the template, strings where `chat_template` says so."""
        if isinstance(prompt, str) and not chat_template:
            return tuple(self._inner.encode(prompt))
        return tuple(self._inner.encode(self._text(_messages(prompt), open_=True), add_special_tokens=False))

    def encode_answer(self, prompt: str | Messages, answer: str, *, chat_template: bool) -> tuple[int, ...]:
        """Token ids of `answer` behind `encode(prompt)`, as an engine would give them: they end in a token that stops it.

        With a chat template, that is what the template writes for the assistant's turn, up to its end. Raises DataError for a
        template that does not continue the prompt with the answer.
        """
        if isinstance(prompt, str) and not chat_template:
            return (*self._behind(prompt, answer, special=True), self._end)
        messages = _messages(prompt)
        before = self._text(messages, open_=True)
        whole = self._text([*messages, {"role": "assistant", "content": answer}], open_=False)
        if not whole.startswith(before):
            raise DataError("the tokenizer's chat template does not go on with the answer where it ends the prompt.")
        ids = self._behind(before, whole[len(before) :], special=False)
        for last in (place for place in reversed(range(len(ids))) if ids[place] in self.stop_ids):
            if not self.decode(ids[last + 1 :]).strip():  # many templates write a line feed behind the end
                return tuple(ids[: last + 1])
            break
        return (*ids, self._end)

    def _behind(self, before: str, after: str, *, special: bool) -> list[int]:
        """Ids of `after`, cut out of the whole where that begins like the prompt: alone, some tokenizers would add a space."""
        prompt, whole = (self._inner.encode(text, add_special_tokens=special) for text in (before, before + after))
        if whole[: len(prompt)] == prompt:
            return list(whole[len(prompt) :])
        return list(self._inner.encode(after, add_special_tokens=False))

    def _text(self, messages: Messages, *, open_: bool) -> str:
        """Through the chat template; `open_`: up to where the assistant begins."""
        try:
            text = self._inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_)
        except (ValueError, TypeError, TemplateError) as error:
            raise DataError(f"the tokenizer's chat template can't take it: {error}") from error
        assert isinstance(text, str)
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer, without special tokens."""
        text = self._inner.decode(list(token_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token, special ones by their name."""
        return self._pieces(token_ids)


def _messages(prompt: str | Messages) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _generation_stop(folder: Path) -> int | list[int] | None:
    path = folder / "generation_config.json"
    return json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None


def _listed(ids: int | list[int] | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else ids
