"""ActorAL: an audio-language policy with the call interface of LightRFT's ActorAL."""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rftmega.core.media_positions import RowImages
from rftmega.core.types import Rows
from rftmega.core.waveform_positions import PlacedWaveform
from rftmega.data.media.audio_processor import AudioProcessor
from rftmega.lightrft.actor import PolicyActor, rows_of_call


class ActorAL(PolicyActor[AudioProcessor]):
    """ActorAL computes log-probs of responses to prompts with waveforms, with a policy, which is
    its attribute `module`.
    """

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        return_output: bool = False,
        return_aligned_inputs: bool = False,
        packed_seq_lens: Sequence[int] | Tensor | None = None,
        audio_values: Tensor | None = None,
        feature_attention_mask: Tensor | None = None,
    ) -> Any:
        """Returns the log-probs of the responses, [B, A], 0 after the end of a response; if packed,
        [1, number of all response tokens].

        `sequences` [B, S]: left-padded prompts and right-padded responses. `num_actions`: A, the
        number of columns of the responses; if packed, the length of each response. `audio_values`
        [I, M, T] are the frames of the rows' waveforms, row by row; `feature_attention_mask` [I, T]
        marks the frames that contain sound. Prompts must have a placeholder for each feature. Under
        torch.no_grad() every process calls the method with the whole batch, in any layout.
        Otherwise the result has a gradient for `strategy.backward`, each process computes its own
        rows, and processes that share layers must pass the same rows. With `return_output` it
        returns (log-probs, TokenStats of all targets); `return_aligned_inputs` appends the
        sequences and their mask, unchanged. Raises ValueError for images and videos, and if rows
        and waveforms don't match.
        """
        seen = (pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
        if any(each is not None for each in seen):
            raise ValueError("ActorAL hears and does not see. Give waveforms as audio_values.")
        rows = rows_of_call(
            sequences, num_actions, attention_mask, packed_seq_lens, packed=self.packing_samples
        )
        rows = with_frames(rows, audio_values, feature_attention_mask, self.processor)
        found = self._forward_result(rows, return_output)
        if not return_aligned_inputs:
            return found
        return (*(found if return_output else (found,)), sequences, attention_mask)


@dataclass(frozen=True, slots=True)
class GivenWaveform:
    """GivenWaveform is a waveform that has not been assigned a position in a prompt."""

    frames: Tensor  # [M, T]
    length: int  # frames that hold sound

    @property
    def digest(self) -> str:
        content = self.frames.contiguous().numpy().tobytes()
        return hashlib.sha256(f"{self.length} ".encode() + content).hexdigest()


def with_frames(
    rows: Rows,
    audio_values: Tensor | None,
    feature_attention_mask: Tensor | None,
    processor: AudioProcessor | None,
) -> Rows:
    """Returns the rows with the waveforms that `audio_values` contains as frames. Returns the rows
    unchanged if they already have waveforms or `audio_values` is None.

    Raises ValueError if the mask or the `processor` is missing, if the frames don't have the length
    of the model's window, and if rows and waveforms don't match.
    """
    if rows.images is not None or audio_values is None:
        return rows
    if processor is None or feature_attention_mask is None:
        raise ValueError(
            "audio_values needs feature_attention_mask, and the model's processor, which knows the token that stands for sound. "
            "Give both."
        )
    wanted = (len(audio_values), processor.window)
    if tuple(feature_attention_mask.shape) != wanted or audio_values.shape[-1] != processor.window:
        raise ValueError(
            f"audio_values {list(audio_values.shape)} and feature_attention_mask {list(feature_attention_mask.shape)} are not "
            f"those of {len(audio_values)} waveforms in windows of {processor.window} frames. Give what the model's own feature "
            "extractor makes."
        )
    given = zip(audio_values.detach().cpu().float(), feature_attention_mask.sum(-1), strict=True)
    left = deque(GivenWaveform(frames, int(length)) for frames, length in given)
    found = []
    for row, end in enumerate(rows.prompt_lengths.tolist()):
        found.append(_placed(rows.tokens[row, :end].tolist(), left, processor, row))
    if left:
        raise ValueError(
            f"audio_values has {len(left)} waveform(s) more than the rows have places for. Leave them out."
        )
    return replace(rows, images=RowImages.of(found))


def _placed(
    ids: list[int], left: deque[GivenWaveform], processor: AudioProcessor, row: int
) -> list[PlacedWaveform]:
    """Returns the waveforms of a prompt with token ids `ids`, each with its position: takes the
    next waveforms from `left` for the prompt's placeholders.

    `row`: the prompt's row, for error messages.
    """
    placed: list[PlacedWaveform] = []
    at = 0
    while processor.placeholder in ids[at:]:
        start = ids.index(processor.placeholder, at)
        waveform = left.popleft() if left else None
        tokens = processor.tokens_of(waveform.length) if waveform else 0
        at = start + tokens
        if waveform is None or ids[start:at] != [processor.placeholder] * tokens or not tokens:
            raise ValueError(
                f"row {row} has {ids.count(processor.placeholder)} placeholders, which the next waveforms of audio_values don't "
                "fill. Give each row's waveforms in the order of the rows, and a placeholder for each feature."
            )
        placed.append(
            PlacedWaveform(
                waveform.frames,
                waveform.digest,
                waveform.length,
                processor.positions,
                start,
                tokens,
            )
        )
    return placed
