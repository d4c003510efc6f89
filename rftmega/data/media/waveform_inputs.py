"""Model inputs of the waveforms in a micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rftmega.core.media_positions import RowImages
from rftmega.core.waveform_positions import PlacedWaveform

Load = Callable[[PlacedWaveform], Tensor]


@dataclass(frozen=True, slots=True)
class WaveformTensors:
    """WaveformTensors holds the waveform inputs of a micro-batch on the host: for each token [B, S]
    the 1-based index of its audio feature (0: text), and the frames of the waveforms.
    """

    # [B, S] int64: the row of the encoder's output that replaces the token's embedding, from 1; 0:
    # none
    features: Tensor
    frames: Tensor | None = None  # [I, M, 2 x positions] of the distinct waveforms; None: none
    lengths: Tensor | None = None  # [I] int64: number of frames with sound

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Returns the keyword arguments that the first model chunk takes for waveforms; empty if
        there is no waveform.
        """
        if self.frames is None or self.lengths is None:
            return {}
        return {"frames": self.frames, "lengths": self.lengths}


def waveform_tensors(
    waveforms: RowImages | None, rows: int, columns: int, *, load: Load | None
) -> WaveformTensors:
    """Returns the waveform inputs of a micro-batch of `rows` rows of `columns` tokens; a waveform
    that several rows share is loaded once. `waveforms`: the waveforms of each row; None if there
    are none.

    `load` returns a waveform's frames; None if this process does not run the audio encoder.
    """
    features = torch.zeros(rows, columns, dtype=torch.int64)
    if waveforms is None:
        return WaveformTensors(features)
    own = waveforms.only(PlacedWaveform)
    distinct = {waveform.digest: waveform for row in own for waveform in row}
    first, total = {}, 1
    for digest, waveform in distinct.items():
        first[digest] = total
        total += waveform.positions // 2  # the tower gives a row for silence, too
    for number, row in enumerate(own):
        for waveform in row:
            begin = first[waveform.digest]
            places = torch.arange(begin, begin + waveform.tokens)
            features[number, waveform.start : waveform.end] = places
    if load is None or not distinct:
        return WaveformTensors(features)
    frames = torch.stack([load(waveform) for waveform in distinct.values()])
    lengths = torch.tensor([waveform.frames for waveform in distinct.values()])
    return WaveformTensors(features, frames, lengths)
