"""LightRFT's Samples and Experience, which store sequences as a canvas: prompts padded on the left
and responses padded on the right, in one tensor.

Column c of `sequences` is a prompt token up to P and a response token from P on; a per-action
tensor [B, A] has the response's i-th token in column i. `rftmega.core.types` starts its rows at
column 0 and aligns with targets: the functions at the end convert between the two layouts.
Positions are derived from lengths, never from token values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from rftmega.core import types
from rftmega.core.media_positions import RowImages
from rftmega.core.types import Rollout, Rows
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.lightrft.image_inputs import PATCHES, ImageInputs, Patches
from rftmega.lightrft.pinned import pinned


def to(tensor: Tensor | list[Tensor], device: torch.device | str) -> Any:
    """Returns a tensor, or a list of tensors, moved to `device`."""
    return [to(each, device) for each in tensor] if isinstance(tensor, list) else tensor.to(device)


def pin_memory(tensor: Tensor | list[Tensor]) -> Any:
    """Returns a tensor, or a list of tensors, copied to page-locked memory, from which copies to a
    device are fast. Returns `tensor` unchanged on a machine without a device.
    """
    if not torch.accelerator.is_available():
        return tensor
    return [pinned(each) for each in tensor] if isinstance(tensor, list) else pinned(tensor)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns `value` with `change` applied if it is a tensor or a list of tensors, and to such
    values in a dict.

    Any other value stays unchanged.
    """
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    tensors = (
        isinstance(value, list) and bool(value) and all(isinstance(each, Tensor) for each in value)
    )
    return change(value) if tensors or isinstance(value, Tensor) else value


@dataclass
class Experience:
    """Experience holds a rollout's sequences for training: B rows of S columns, of which the last A
    columns are the responses.
    """

    sequences: Tensor  # [B, S] int64, left-padded prompts and right-padded responses
    action_log_probs: Tensor  # [B, A] under the trainer, before this rollout's first update
    base_action_log_probs: Tensor | None  # [B, A] under the reference
    values: Tensor | None  # [B, A]
    returns: Tensor | None  # [B, A]
    advantages: Tensor | None  # [B, A]
    attention_mask: Tensor | None  # [B, S] bool
    action_mask: Tensor | None  # [B, A] bool
    info: dict[str, Any] | None  # name -> [B] or [B, A], or a value that is no tensor
    kl: Tensor | None = None  # [B, A]
    # [B, A], for training on high-entropy tokens only (arXiv:2506.01939)
    action_entropy: Tensor | None = None
    # [P, C] float: patches of the images of all rows, row by row; None where there are none
    pixel_values: Tensor | None = None
    # [I, 3] int64: patches of each along time, height and width
    image_grid_thw: Tensor | None = None
    pixel_values_videos: Tensor | None = None  # the same for videos
    video_grid_thw: Tensor | None = None
    # rftmega's own record of them, in experiences that it made
    images: RowImages | None = None

    def to_device(self, device: torch.device | str) -> "Experience":
        """Moves every tensor, including those in `info`, to `device`. Returns itself."""
        return self._change(lambda value: to(value, device))

    def pin_memory(self) -> "Experience":
        """Copies every tensor, including those in `info`, to page-locked memory. Returns itself.

        Changes nothing on a machine without a device.
        """
        return self._change(pin_memory)

    def _change(self, change: Callable[[Any], Any]) -> "Experience":
        for each in fields(self):
            setattr(self, each.name, _changed(getattr(self, each.name), change))
        return self


@dataclass
class Samples:
    """Samples holds the completions of one rollout, either batched (a canvas [B, S]) or packed (one
    row with the tokens of all B sequences, one after another).
    """

    sequences: Tensor  # [B, S] int64; packed [1, total]
    # [B, S] bool; packed [1, total] int64: which sequence, from 1 on; 0 is padding
    attention_mask: Tensor
    action_mask: Tensor | None  # [B, A] bool; packed None
    num_actions: int | Tensor  # A; packed [B] int64
    packed_seq_lens: Tensor | None  # batched None; packed [B] int64
    response_length: Tensor  # [B] int64
    total_length: Tensor  # [B] int64: prompt and response
    prompts: list[Any]  # as they were given
    labels: list[str]
    pad_len: int | None  # packed: padding tokens after the last sequence
    # the engine's rollouts, if it generated these
    rollouts: list[Rollout] | None = field(default=None, init=False)
    # [B] int64; rows with equal numbers have the same prompt
    group: Tensor | None = field(default=None, init=False)
    pixel_values: Tensor | None = None  # as in Experience
    image_grid_thw: Tensor | None = None
    pixel_values_videos: Tensor | None = None
    video_grid_thw: Tensor | None = None
    images: RowImages | None = None

    @classmethod
    def of(cls, rows: Rows, *, prompts: list[Any], labels: list[str], pad_id: int = 0) -> "Samples":
        """Returns `rows` as batched samples; the canvas is as wide as the longest prompt plus the
        longest response, and `pad_id` fills its padding.

        `prompts`, `labels`: the prompt and the reward label of each row.
        """
        lengths = rows.lengths - rows.prompt_lengths
        width, actions = _widest(rows.prompt_lengths), _widest(lengths)
        sequences, attention_mask = canvas(rows, width, actions, pad_id=pad_id)
        return cls(
            sequences=sequences,
            attention_mask=attention_mask,
            action_mask=_begun(lengths),
            num_actions=actions,
            packed_seq_lens=None,
            response_length=lengths,
            total_length=rows.lengths,
            prompts=prompts,
            labels=labels,
            pad_len=None,
            images=rows.images,
        )

    def rows(self) -> Rows:
        """Returns the sequences as Rows, which start at column 0 and are padded with 0.

        Raises ValueError if `action_mask` omits tokens of a response, which Rows can't represent.
        """
        if self.packed_seq_lens is not None:
            ends = self.packed_seq_lens.cumsum(0)
            kept = _begun(self.total_length)
            tokens = torch.zeros_like(kept, dtype=self.sequences.dtype)
            column = (
                torch.arange(kept.shape[1], device=ends.device)
                + (ends - self.packed_seq_lens)[:, None]
            )
            tokens[kept] = self.sequences[0, column[kept]]
        else:
            assert isinstance(self.num_actions, int)
            self._refuse_holes()
            prompts = self.sequences.shape[1] - self.num_actions
            tokens = flush(
                self.sequences,
                prompts - (self.total_length - self.response_length),
                self.total_length,
            )
        prompt_lengths = self.total_length - self.response_length
        rows = Rows.of_completions(tokens, prompt_lengths, self.total_length)
        return replace(rows, images=self.images)

    def packed(self, *, pad_len: int = 0, pad_id: int = 0) -> "Samples":
        """Returns the same samples packed into one row, followed by `pad_len` padding tokens
        `pad_id`.
        """
        rows = self.rows()
        kept = _begun(rows.lengths)
        number = torch.arange(1, len(rows) + 1, device=kept.device)[:, None].expand_as(kept)
        tail = rows.lengths.new_full((pad_len,), pad_id)
        found = Samples(
            sequences=torch.cat((rows.tokens[kept], tail))[None],
            attention_mask=torch.cat((number[kept], torch.zeros_like(tail)))[None],
            action_mask=None,
            num_actions=self.response_length,
            packed_seq_lens=self.total_length,
            response_length=self.response_length,
            total_length=self.total_length,
            prompts=self.prompts,
            labels=self.labels,
            pad_len=pad_len,
        )
        return self._beside(found)

    def batched(self, *, pad_id: int = 0) -> "Samples":
        """Returns the same samples batched, as a canvas of minimal width in which `pad_id` fills
        the padding.
        """
        found = Samples.of(self.rows(), prompts=self.prompts, labels=self.labels, pad_id=pad_id)
        return self._beside(found)

    def _beside(self, found: "Samples") -> "Samples":
        """Copies the fields that are independent of the layout to `found`, samples of the same
        rows. Returns `found`.
        """
        found.rollouts, found.group = self.rollouts, self.group
        for name in PATCHES:
            setattr(found, name, getattr(self, name))
        found.images = self.images
        return found

    def _refuse_holes(self) -> None:
        if self.action_mask is None:
            return
        whole = _begun(self.response_length, self.action_mask.shape[1])
        if bool((odd := (self.action_mask.bool() != whole).any(-1)).any()):
            raise ValueError(
                f"action_mask of row(s) {odd.nonzero()[:, 0].tolist()} is not their first response_length columns. "
                "Rows hold whole responses only: leave such tokens out of the loss through Experience.action_mask."
            )


def _widest(lengths: Tensor) -> int:
    return int(lengths.max()) if len(lengths) else 0


def _begun(lengths: Tensor, width: int | None = None) -> Tensor:
    """Returns a mask [B, width] that is True in the first lengths[b] columns of row b. `width`
    None: the longest length.
    """
    return (
        torch.arange(_widest(lengths) if width is None else width, device=lengths.device)
        < lengths[:, None]
    )


def shifted(x: Tensor, by: Tensor, kept: Tensor, fill: float = 0) -> Tensor:
    """Returns out[b, c] = x[b, c + by[b]] where kept[b, c] is True, and `fill` elsewhere.

    Shapes: x [B, N], by [B], kept [B, width] bool.
    """
    if not x.shape[1]:
        return x.new_full(kept.shape, fill)
    column = torch.arange(kept.shape[1], device=x.device) + by[:, None]
    return x.gather(1, torch.where(kept, column, 0)).masked_fill(~kept, fill)


def canvas(
    rows: Rows, prompt_width: int, actions: int, *, pad_id: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns (sequences, attention mask), both [B, prompt_width + actions]: rows that start at
    column 0 as a canvas, whose first `prompt_width` columns hold the left-padded prompts and whose
    last `actions` columns hold the responses.
    """
    by = rows.prompt_lengths - prompt_width
    column = torch.arange(prompt_width + actions, device=by.device) + by[:, None]
    kept = (column >= 0) & (column < rows.lengths[:, None])
    return shifted(rows.tokens, by, kept, pad_id), kept


def flush(sequences: Tensor, by: Tensor, lengths: Tensor) -> Tensor:
    """Returns the rows of a canvas shifted to the left, [B, longest length]; the first token of row
    b is in column by[b] of the canvas.

    Columns after a row's last token are 0.
    """
    return shifted(sequences, by, _begun(lengths))


def per_action(x: Tensor, rows: Rows) -> Tensor:
    """Converts `x` [B, T], aligned with the targets of `rows` (column t belongs to token t + 1 of a
    row), to a per-action tensor [B, A], which has only the response tokens.

    Columns after the end of a response are 0. Raises ValueError for an empty prompt: no position
    predicts the first token of its response.
    """
    _refuse_empty(rows.prompt_lengths)
    lengths = rows.lengths - rows.prompt_lengths
    return shifted(x, rows.prompt_lengths - 1, _begun(lengths))


def per_target(x: Tensor, rows: Rows) -> Tensor:
    """Converts `x`, a per-action tensor [B, A] of the responses in `rows`, to a tensor [B, T]
    aligned with targets (column t belongs to token t + 1 of a row), 0 outside the response.

    Raises ValueError for an empty prompt.
    """
    _refuse_empty(rows.prompt_lengths)
    return shifted(x, 1 - rows.prompt_lengths, rows.mask)


def _refuse_empty(prompt_lengths: Tensor) -> None:
    if bool((prompt_lengths < 1).any()):
        row = int((prompt_lengths < 1).nonzero()[0])
        raise ValueError(
            f"Row {row} has an empty prompt, so nothing predicts its first token. Begin prompts with a token."
        )


BEHAVIOUR = "behaviour_log_probs"  # key of `info`: [B, A], log-probs reported by the engine


def with_patches(
    rows: Rows,
    patches: Patches,
    processor: ImageProcessor | None,
) -> Rows:
    """Returns the rows with the images and videos that `patches` contains. Returns the rows
    unchanged if they already have images or `patches` is empty.

    Raises ValueError if `processor` is None, and if rows and patches don't match.
    """
    if rows.images is not None or not patches:
        return rows
    if processor is None:
        raise ValueError(
            "pixel_values needs the model's processor, which knows the tokens that stand for images. Give both."
        )
    return replace(rows, images=ImageInputs(processor).of_rows(rows, patches))


def rows_of_canvas(sequences: Tensor, attention_mask: Tensor, actions: int) -> Rows:
    """Returns the rows of a canvas `sequences` [B, S] whose last `actions` columns belong to the
    responses; `attention_mask` [B, S] is True where there is a token.
    """
    prompts = sequences.shape[1] - actions
    prompt_lengths = attention_mask[:, :prompts].bool().sum(-1)
    lengths = attention_mask.bool().sum(-1)
    tokens = flush(sequences, prompts - prompt_lengths, lengths)
    return Rows.of_completions(tokens, prompt_lengths, lengths)


def to_experience(padded: Experience, processor: ImageProcessor | None = None) -> types.Experience:
    """Returns LightRFT's Experience as rftmega's Experience. Without info["behaviour_log_probs"],
    the trainer's log-probs are used as the engine's.

    `processor`: image processor of a vision-language model, needed if pixel_values come from
    outside rftmega. Raises ValueError if masks or advantages are missing, if a prompt is empty, or
    if rows and patches don't match.
    """
    missing = [
        name
        for name in ("attention_mask", "action_mask", "advantages")
        if getattr(padded, name) is None
    ]
    if missing:
        raise ValueError(
            f"The experience has no {', '.join(missing)}: a loss needs them. Compute advantages first."
        )
    assert (
        padded.attention_mask is not None
        and padded.action_mask is not None
        and padded.advantages is not None
    )
    rows = rows_of_canvas(padded.sequences, padded.attention_mask, padded.action_mask.shape[1])
    rows = replace(rows, images=padded.images)
    rows = with_patches(rows, Patches.held_by(padded), processor)
    behaviour = (padded.info or {}).get(BEHAVIOUR, padded.action_log_probs)

    def laid_out(values: Tensor | None) -> Tensor | None:
        return None if values is None else per_target(values, rows)

    return types.Experience(
        tokens=rows.tokens,
        prompt_lengths=rows.prompt_lengths,
        lengths=rows.lengths,
        mask=per_target(padded.action_mask.bool(), rows),
        behaviour_logp=per_target(behaviour, rows),
        old_logp=per_target(padded.action_log_probs, rows),
        reference_logp=laid_out(padded.base_action_log_probs),
        advantage=per_target(padded.advantages, rows),
        old_value=laid_out(padded.values),
        returns=laid_out(padded.returns),
        entropy=laid_out(padded.action_entropy),
        images=rows.images,
    )


def of_experience(
    own: types.Experience[Any], *, pad_id: int = 0, processor: ImageProcessor | None = None
) -> Experience:
    """Returns rftmega's Experience, padded or not, as LightRFT's Experience; `pad_id` fills the
    padding of `sequences`.

    Fields that rftmega's Experience lacks (such as kl) or that are None become None. pixel_values
    is None if images are files and `processor` is None.
    """
    own = own.padded()
    rows = own.rows
    assert own.old_logp is not None, "only an update that scores for itself goes without"
    actions = _widest(rows.lengths - rows.prompt_lengths)
    sequences, attention_mask = canvas(rows, _widest(rows.prompt_lengths), actions, pad_id=pad_id)

    patches = Patches.of(rows.images, processor)

    def laid_out(values: Tensor | None) -> Tensor | None:
        return None if values is None else per_action(values, rows)

    return Experience(
        sequences=sequences,
        action_log_probs=per_action(own.old_logp, rows),
        base_action_log_probs=laid_out(own.reference_logp),
        values=laid_out(own.old_value),
        returns=laid_out(own.returns),
        advantages=per_action(own.advantage, rows),
        attention_mask=attention_mask,
        action_mask=per_action(own.mask, rows),
        info={
            BEHAVIOUR: per_action(own.behaviour_logp, rows),
            "response_length": rows.lengths - rows.prompt_lengths,
            "total_length": rows.lengths,
        },
        action_entropy=laid_out(own.entropy),
        pixel_values=patches.pixel_values,
        image_grid_thw=patches.image_grid_thw,
        pixel_values_videos=patches.pixel_values_videos,
        video_grid_thw=patches.video_grid_thw,
        images=rows.images,
    )
