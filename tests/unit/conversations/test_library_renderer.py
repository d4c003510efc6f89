"""A renderer's tokenizer keeps the tokens of short texts, and gives what the folder's gives."""

from typing import Any

from rftmega.conversations.library_renderer import SHORT, _remembering


class Encodes:
    """Encodes a text as its characters, behind a special token, and counts."""

    asked = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.asked += 1
        return [0] * add_special_tokens + [ord(each) for each in text]


def test_short_texts_are_encoded_once_and_all_else_every_time() -> None:
    inner = Encodes()
    remembering: Any = _remembering(inner)
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
