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

    def __init__(self, folder: str | Path):
        """Raises CheckpointError where the folder holds no tokenizer or one without an end-of-sequence token."""
        try:
            self._inner = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} holds no tokenizer that transformers can read: {error}") from error
        self._pieces = Pieces(lambda ids: str(self._inner.decode(list(ids), skip_special_tokens=False)))
        self.stop_ids = sorted({*_listed(self._inner.eos_token_id), *_listed(_generation_stop(Path(folder)))})
        """Every id that ends an answer: the tokenizer's end of sequence and those of generation_config.json."""
        if not self.stop_ids:
            raise CheckpointError(f"The tokenizer in {folder} names no eos_token, so no answer could ever stop.")

    def encode(self, prompt: str | Messages, *, chat_template: bool) -> tuple[int, ...]:
        """Token ids of a prompt; chat messages always go through the template, strings where `chat_template` says so."""
        if isinstance(prompt, str) and not chat_template:
            return tuple(self._inner.encode(prompt))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = self._inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (ValueError, TypeError, TemplateError) as error:
            raise DataError(f"the tokenizer's chat template can't take it: {error}") from error
        return tuple(self._inner.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer, without special tokens."""
        text = self._inner.decode(list(token_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token, special ones by their name."""
        return self._pieces(token_ids)


def _generation_stop(folder: Path) -> int | list[int] | None:
    path = folder / "generation_config.json"
    return json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None


def _listed(ids: int | list[int] | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else ids
