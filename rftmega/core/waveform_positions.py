"""PlacedWaveform is a waveform among the tokens of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlacedWaveform:
    """PlacedWaveform is a waveform of a prompt, and says where its features stand among the tokens.

    Two are equal where their contents and places are.
    """

    # a file's path, a file's bytes, or the frames [M, 2 x positions] themselves
    source: str | bytes | Tensor = field(compare=False, repr=False)
    digest: str  # SHA-256 of the file's bytes, in hexadecimal
    frames: int  # those that hold sound
    positions: int  # of the tower's layers, which its window fills whatever it holds
    start: int  # its first token among those of the prompt
    tokens: int  # how many it has

    @property
    def patches(self) -> int:
        """Returns what the tower computes, in positions: an image's are its patches."""
        return self.positions

    @property
    def end(self) -> int:
        return self.start + self.tokens

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Returns where features stand: first token and the one behind the last."""
        return [(self.start, self.end)]

    def state(self) -> list[object]:
        """Returns the waveform as JSON has it, but for contents that are in no file: a tensor."""
        source: object = self.source
        if isinstance(source, bytes):
            source = torch.frombuffer(bytearray(source), dtype=torch.uint8)
        return [source, self.digest, self.frames, self.positions, self.start, self.tokens]

    @staticmethod
    def from_state(state: Sequence[Any]) -> "PlacedWaveform":
        """Returns what `state` gave."""
        source, digest, frames, positions, start, tokens = state
        if isinstance(source, Tensor) and source.dtype == torch.uint8:
            source = source.numpy().tobytes()
        return PlacedWaveform(source, str(digest), frames, positions, start, tokens)
