"""Images, videos and waveforms among the tokens of a prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from rftmega.core.waveform_positions import PlacedWaveform


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames tells what a video shows of its file, and where the features of that stand.

    They are one run of tokens, or one for each time of the grid with words between them.
    """

    chosen: tuple[int, ...]  # of the file's, in their order
    total: int  # that the file has
    rate: float  # frames of the file a second
    step: float  # positions from one time of a run to the next
    starts: tuple[int, ...]  # of each run, counted from the video's first token
    length: int  # of a run: how many features stand there


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """PlacedImage is an image or a video of a prompt, and says where its features stand among the
    tokens.

    Two are equal where their contents and places are.
    """

    # a file's path, a file's bytes, or the patches [t * h * w, channels * patch * patch * 2]
    source: str | bytes | Tensor = field(compare=False, repr=False)
    digest: str  # SHA-256, in hexadecimal, of the file's bytes, or of those of the frames shown
    grid: tuple[int, int, int]  # patches: of time (1), along the height and along the width
    start: int  # its first token among those of the prompt
    tokens: int  # how many it has: one each merge x merge patches, and words between a video's runs
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
        """Returns where features stand: first token and the one behind the last, of each run."""
        if self.frames is None:
            return [(self.start, self.end)]
        begins = [self.start + start for start in self.frames.starts]
        return [(begin, begin + self.frames.length) for begin in begins]

    @property
    def features(self) -> int:
        return sum(end - begin for begin, end in self.runs)

    def state(self) -> list[object]:
        """Returns the image as JSON has it, but for contents that are in no file: a tensor."""
        source: object = self.source
        if isinstance(source, bytes):
            source = torch.frombuffer(bytearray(source), dtype=torch.uint8)
        frames = [] if self.frames is None else [list(astuple(self.frames))]
        return [source, self.digest, list(self.grid), self.start, self.tokens, *frames]

    @staticmethod
    def from_state(state: Sequence[object]) -> "PlacedImage":
        """Returns what `state` gave."""
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
    """Returns the images and videos among what stands in a prompt."""
    return tuple(each for each in placed if isinstance(each, PlacedImage))


@dataclass(frozen=True, slots=True)
class RowImages:
    """RowImages tells which images, or waveforms, each row of a batch has."""

    rows: tuple[tuple[Placed, ...], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, index: Iterable[int]) -> "RowImages":
        return RowImages(tuple(self.rows[row] for row in index))

    @property
    def patches(self) -> list[int]:
        """Returns how many patches each row has."""
        return [sum(image.patches for image in row) for row in self.rows]

    @property
    def distinct(self) -> dict[str, Placed]:
        """Returns digest -> an image, in the order of their first places."""
        found: dict[str, Placed] = {}
        for row in self.rows:
            for image in row:
                found.setdefault(image.digest, image)
        return found

    def only(self, kind: type[Kind]) -> "list[tuple[Kind, ...]]":
        """Returns those of each row that are of a kind, as a model that knows no other takes them."""
        return [tuple(each for each in row if isinstance(each, kind)) for row in self.rows]

    @staticmethod
    def of(rows: Iterable[Sequence[Placed]]) -> "RowImages | None":
        """Returns the images of rows; None where no row has one."""
        held = tuple(tuple(row) for row in rows)
        return RowImages(held) if any(held) else None

    @staticmethod
    def join(parts: "Sequence[RowImages | None]", sizes: Sequence[int]) -> "RowImages | None":
        """Joins the rows of several batches, each of so many rows."""
        rows: list[tuple[Placed, ...]] = []
        for part, size in zip(parts, sizes, strict=True):
            rows += [()] * size if part is None else part.rows
        return RowImages.of(rows)

    def state(self) -> list[list[list[object]]]:
        """Returns the rows as JSON has them, contents that are in no file as tensors."""
        return [[image.state() for image in row] for row in self.rows]

    @staticmethod
    def from_state(state: Sequence[Sequence[Sequence[object]]]) -> "RowImages":
        """Returns what `state` gave."""
        return RowImages(tuple(tuple(map(placed_from_state, row)) for row in state))


def placed_from_state(state: Sequence[Any]) -> Placed:
    """Returns an image, which has a grid in the third place, or a waveform, which has a number."""
    kind = PlacedImage if isinstance(state[2], Sequence) else PlacedWaveform
    return kind.from_state(state)


def unexpanded(token_ids: Sequence[int], images: Sequence[Placed]) -> list[int]:
    """Returns the tokens with one placeholder an image, video or waveform, as an engine's own
    processor takes them: it
    would expand what is expanded once more.
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
