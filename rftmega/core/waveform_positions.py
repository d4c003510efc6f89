"""Position of a waveform among the tokens of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlacedWaveform:
    """PlacedWaveform is a waveform of a prompt with the token positions of its features.

    Two are equal if their digests and positions are.
    """

    # a file's path, a file's bytes, or the frames [M, 2 x positions] themselves
    source: str | bytes | Tensor = field(compare=False, repr=False)
    digest: str  # SHA-256 of the file's bytes, in hexadecimal
    frames: int  # frames that contain audio
    positions: int  # positions in the audio encoder's layers; its window has a fixed size
    start: int  # index of its first token in the prompt
    tokens: int  # number of its tokens

    @property
    def patches(self) -> int:
        """Returns the number of audio-encoder positions: the cost of encoding, which corresponds to
        an image's number of patches.
        """
        return self.positions

    @property
    def end(self) -> int:
        return self.start + self.tokens

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Returns the token range [start, end) of the waveform's features, as a list of one."""
        return [(self.start, self.end)]

    def state(self) -> list[object]:
        """Returns the waveform as a JSON list; contents that are not in a file become a tensor."""
        source: object = self.source
        if isinstance(source, bytes):
            source = torch.frombuffer(bytearray(source), dtype=torch.uint8)
        return [source, self.digest, self.frames, self.positions, self.start, self.tokens]

    @staticmethod
    def from_state(state: Sequence[Any]) -> "PlacedWaveform":
        """Restores a waveform from the list that `state` returned."""
        source, digest, frames, positions, start, tokens = state
        if isinstance(source, Tensor) and source.dtype == torch.uint8:
            source = source.numpy().tobytes()
        return PlacedWaveform(source, str(digest), frames, positions, start, tokens)
