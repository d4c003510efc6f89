"""Positions of images, videos and waveforms among the tokens of a prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from rftmega.core.waveform_positions import PlacedWaveform


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames records which frames of a video file are used, and the token positions of their
    features.

    The features are one contiguous run of tokens, or one run per time step of the grid with text
    tokens in between.
    """

    chosen: tuple[int, ...]  # indices of the frames used, in order
    total: int  # frames in the file
    rate: float  # frames per second of the file
    step: float  # positions from one time step of a run to the next
    starts: tuple[int, ...]  # of each run, counted from the video's first token
    length: int  # features per run


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """PlacedImage is an image or a video of a prompt with the token positions of its features.

    Two are equal if their digests and positions are.
    """

    # a file's path, a file's bytes, or the patches [t * h * w, channels * patch * patch * 2]
    source: str | bytes | Tensor = field(compare=False, repr=False)
    digest: str  # SHA-256, in hexadecimal, of the file's bytes or of the frames used
    grid: tuple[int, int, int]  # patches along time (1), height and width
    start: int  # index of its first token in the prompt
    tokens: int  # one per merge x merge patches, and text tokens between a video's runs
    frames: Frames | None = None  # of a video

    @property
    def patches(self) -> int:
        time, height, width = self.grid
        return time * height * width

    @property
    def end(self) -> int:
        return self.start + self.tokens

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Returns the token ranges [start, end) of the image's features."""
        if self.frames is None:
            return [(self.start, self.end)]
        begins = [self.start + start for start in self.frames.starts]
        return [(begin, begin + self.frames.length) for begin in begins]

    @property
    def features(self) -> int:
        return sum(end - begin for begin, end in self.runs)

    def state(self) -> list[object]:
        """Returns the image as a JSON list; contents that are not in a file become a tensor."""
        source: object = self.source
        if isinstance(source, bytes):
            source = torch.frombuffer(bytearray(source), dtype=torch.uint8)
        frames = [] if self.frames is None else [list(astuple(self.frames))]
        return [source, self.digest, list(self.grid), self.start, self.tokens, *frames]

    @staticmethod
    def from_state(state: Sequence[object]) -> "PlacedImage":
        """Restores an image from the list that `state` returned."""
        given: list[Any] = list(state)
        source, digest, grid, start, tokens = given[:5]
        if isinstance(source, Tensor) and source.dtype == torch.uint8:
            source = source.numpy().tobytes()
        frames = None
        if given[5:]:
            chosen, total, rate, step, starts, length = given[5]
            frames = Frames(tuple(chosen), total, rate, step, tuple(starts), length)
        return PlacedImage(source, digest, tuple(grid), start, tokens, frames)


Placed = PlacedImage | PlacedWaveform
Kind = TypeVar("Kind", PlacedImage, PlacedWaveform)


def images_of(placed: Iterable[Placed]) -> tuple[PlacedImage, ...]:
    """Returns the images and videos among a prompt's media."""
    return tuple(each for each in placed if isinstance(each, PlacedImage))


@dataclass(frozen=True, slots=True)
class RowImages:
    """RowImages holds the images, videos and waveforms of each row of a batch."""

    rows: tuple[tuple[Placed, ...], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, index: Iterable[int]) -> "RowImages":
        return RowImages(tuple(self.rows[row] for row in index))

    @property
    def patches(self) -> list[int]:
        """Returns the number of image patches (for waveforms: encoder positions) of each row."""
        return [sum(image.patches for image in row) for row in self.rows]

    @property
    def distinct(self) -> dict[str, Placed]:
        """Returns the distinct media of all rows, as digest -> image, video or waveform, in the
        order of first occurrence.
        """
        found: dict[str, Placed] = {}
        for row in self.rows:
            for image in row:
                found.setdefault(image.digest, image)
        return found

    def only(self, kind: type[Kind]) -> "list[tuple[Kind, ...]]":
        """Returns each row's media of the type `kind` (PlacedImage or PlacedWaveform), for a model
        that accepts only this type.
        """
        return [tuple(each for each in row if isinstance(each, kind)) for row in self.rows]

    @staticmethod
    def of(rows: Iterable[Sequence[Placed]]) -> "RowImages | None":
        """Builds RowImages from the media of each row; returns None if no row has any."""
        held = tuple(tuple(row) for row in rows)
        return RowImages(held) if any(held) else None

    @staticmethod
    def join(parts: "Sequence[RowImages | None]", sizes: Sequence[int]) -> "RowImages | None":
        """Joins the rows of several batches. `parts`: the media of each batch, None for a batch
        without media; `sizes`: number of rows of each batch.
        """
        rows: list[tuple[Placed, ...]] = []
        for part, size in zip(parts, sizes, strict=True):
            rows += [()] * size if part is None else part.rows
        return RowImages.of(rows)

    def state(self) -> list[list[list[object]]]:
        """Returns the rows as JSON lists; contents that are not in a file become tensors."""
        return [[image.state() for image in row] for row in self.rows]

    @staticmethod
    def from_state(state: Sequence[Sequence[Sequence[object]]]) -> "RowImages":
        """Restores the rows from the lists that `state` returned."""
        return RowImages(tuple(tuple(map(placed_from_state, row)) for row in state))


def placed_from_state(state: Sequence[Any]) -> Placed:
    """Restores an image or video (the third entry of `state` is a grid) or a waveform (the third
    entry is a number).
    """
    kind = PlacedImage if isinstance(state[2], Sequence) else PlacedWaveform
    return kind.from_state(state)


def unexpanded(token_ids: Sequence[int], images: Sequence[Placed]) -> list[int]:
    """Returns the tokens with a single placeholder per image, video or waveform of `images`, as an
    engine's own processor expects them, which expands placeholders itself.
    """
    kept: list[int] = []
    before = 0
    for image in images:
        kept += token_ids[before : image.start]
        first, _ = image.runs[0]
        kept.append(token_ids[first])
        before = image.end
    kept += token_ids[before:]
    return kept
