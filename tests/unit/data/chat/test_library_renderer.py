"""A renderer's tokenizer keeps the tokens of short texts, and gives what the folder's gives."""

from pathlib import Path
from typing import Any

import pytest
from renderers.base import attribute_text_segments
from transformers import AutoTokenizer

from rftmega.data.chat.library_renderer import SHORT, _remembering
from rftmega.data.control_tokens.names import ControlTokens
from tests import chat_formats


class Encodes:
    """Encodes a text as its characters, behind a special token, and counts."""

    asked = 0
    is_fast = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.asked += 1
        return [0] * add_special_tokens + [ord(each) for each in text]


class Plain:
    """Encodes as a tokenizer does where no control token is hidden."""

    def __init__(self, inner: Any):
        self.inner = inner

    def found(self, value: Any, *, words: bool = False) -> list[str]:
        return []

    def hidden(self, value: Any, *, words: bool = False) -> Any:
        return value

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.inner.encode(text, add_special_tokens=False)
        return found

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self.inner(text, return_offsets_mapping=True)
        return found["input_ids"], found["offset_mapping"]


def test_short_texts_are_encoded_once_and_all_else_every_time() -> None:
    inner = Encodes()
    remembering: Any = _remembering(inner, Plain(inner))
    for _ in range(3):
        found = remembering.encode("ab", add_special_tokens=False)
        assert found == [97, 98]
        found.append(7)  # whoever asked may change its own
    assert inner.asked == 1
    assert remembering.encode("ab") == [0, 97, 98]
    long = "a" * (SHORT + 1)
    for _ in range(2):
        assert len(remembering.encode(long, add_special_tokens=False)) == len(long)
    assert inner.asked == 4


@pytest.mark.parametrize("clean", [False, True])
def test_the_copy_decodes_and_tells_places_as_the_folder_s_tokenizer_does(
    tmp_path: Path, clean: bool
) -> None:
    chat_formats.folder(tmp_path, chat_formats.FORMATS["qwen3"])
    inner = AutoTokenizer.from_pretrained(tmp_path, clean_up_tokenization_spaces=clean)
    remembering = _remembering(inner, ControlTokens(inner, str))
    ids = inner.encode("<think> do n't , yák </think> 1 . <|im_end|>", add_special_tokens=False)
    for options in ({}, {"skip_special_tokens": False}, {"skip_special_tokens": True}):
        assert remembering.decode(ids, **options) == inner.decode(ids, **options)
    for text in ("a", "b", "a yák"):
        segments = [("\n", False), (text, True)]
        found = attribute_text_segments(remembering, segments)
        assert found == attribute_text_segments(inner, segments)
        assert found.has_content_attribution


def test_whether_places_are_told_is_asked_once() -> None:
    class Tells(Encodes):
        def __call__(self, text: str, **options: Any) -> dict[str, list[Any]]:
            return {"input_ids": self.encode(text), "offset_mapping": [(0, 0)]}

    inner = Tells()
    ask = _remembering(inner, Plain(inner)).__call__
    for _ in range(3):
        assert ask("a", return_offsets_mapping=True)["input_ids"] == [0, 97]
    assert inner.asked == 1
    assert ask("b", return_offsets_mapping=True)["input_ids"] == [0, 98]
    assert inner.asked == 2
