"""Pictures among the tokens of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """PlacedPicture is a picture of a prompt, and says where its features stand among the tokens.

    Two are equal where their contents and places are.
    """

    # a file's path, a file's bytes, or the patches [h * w, channels * patch * patch * 2] themselves
    source: str | bytes | Tensor = field(compare=False, repr=False)
    digest: str  # SHA-256 of the file's bytes, in hexadecimal
    grid: tuple[int, int, int]  # patches: of time (1), along the height and along the width
    start: int  # its first token among those of the prompt
    tokens: int  # how many it has: one each merge x merge patches

    @property
    def patches(self) -> int:
        time, height, width = self.grid
        return time * height * width

    @property
    def end(self) -> int:
        return self.start + self.tokens


def unexpanded(token_ids: Sequence[int], pictures: Sequence[PlacedPicture]) -> list[int]:
    """Returns the tokens with one placeholder a picture, as an engine's own processor takes them: it
    would expand what is expanded once more.
    """
    kept: list[int] = []
    before = 0
    for picture in pictures:
        kept += token_ids[before : picture.start + 1]
        before = picture.end
    kept += token_ids[before:]
    return kept
