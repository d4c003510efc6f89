"""Lays out what a model is fed of the pictures and videos of a micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rftmega.core.media_positions import PlacedPicture, RowPictures

Load = Callable[[PlacedPicture], Tensor]


@dataclass(frozen=True, slots=True)
class FedPictures:
    """FedPictures holds positions and features of the tokens [B, S] of a micro-batch, on the host."""

    positions: Tensor  # [B, S, 3] int64: time, height, width
    # [B, S] int64: which row of the tower's output stands in the token's place, from 1; 0 for words
    features: Tensor
    pixels: Tensor | None = (
        None  # [P, C] patches of the distinct pictures; None where there are none
    )
    grids: Tensor | None = None  # [I, 3] int64: patches of each along time, height and width

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Returns what the first chunk is given besides; nothing where there is no picture."""
        if self.pixels is None or self.grids is None:
            return {}
        return {"pixels": self.pixels, "grids": self.grids}


def fed_pictures(
    pictures: RowPictures | None, rows: int, columns: int, *, merge: int, load: Load | None
) -> FedPictures:
    """Returns what `rows` rows of `columns` tokens are fed with; a picture that several rows have is
    loaded once.

    `merge`: patches along each side that become one feature. `load` gives a picture's patches; None
    where this process feeds none.
    """
    positions = torch.arange(columns).repeat(rows, 1)[..., None].repeat(1, 1, 3)
    features = torch.zeros(rows, columns, dtype=torch.int64)
    if pictures is None:
        return FedPictures(positions, features)
    own = pictures.only(PlacedPicture)
    distinct = {picture.digest: picture for row in own for picture in row}
    first, total = {}, 1
    for digest, picture in distinct.items():
        first[digest] = total
        total += picture.features
    for number, row in enumerate(own):
        positions[number] = picture_positions(row, columns, merge=merge)
        for picture in row:
            number_of = first[picture.digest]
            for begin, end in picture.runs:
                features[number, begin:end] = torch.arange(number_of, number_of + end - begin)
                number_of += end - begin
    if load is None or not distinct:
        return FedPictures(positions, features)
    pixels = torch.cat([load(picture) for picture in distinct.values()])
    grids = torch.tensor([picture.grid for picture in distinct.values()])
    return FedPictures(positions, features, pixels, grids)


def picture_positions(pictures: tuple[PlacedPicture, ...], columns: int, *, merge: int) -> Tensor:
    """Returns [columns, 3] positions of a row (Qwen2-VL, arXiv:2409.12191, section 2.1).

    A word's three are alike and go on by one. A picture's features begin where the words stood;
    height and width count its rows and columns, and a video's time goes on by its step. What
    follows goes on behind the largest of them, as in vLLM: transformers 5.19 leaves time out there,
    so that the words behind a long video would stand amid it.
    """
    parts: list[Tensor] = []
    at = end = 0
    for picture in pictures:
        block = _block(picture, merge)
        for first, behind in picture.runs:
            parts.append(_words(at, first - end))
            at += first - end
            parts.append(at + block)
            at += int(block.max()) + 1
            end = behind
    parts.append(_words(at, max(columns - end, 0)))
    return torch.cat(parts)[:columns]


def _block(picture: PlacedPicture, merge: int) -> Tensor:
    """Returns [features, 3] positions of one run, from 0."""
    time, height, width = picture.grid[0], picture.grid[1] // merge, picture.grid[2] // merge
    times = torch.arange(time // len(picture.runs), dtype=torch.float64)
    if picture.frames is not None:
        times *= picture.frames.step
    return torch.cartesian_prod(times.long(), torch.arange(height), torch.arange(width))


def _words(first: int, number: int) -> Tensor:
    return torch.arange(first, first + number)[:, None].expand(-1, 3)
