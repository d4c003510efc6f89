"""LightRFT's Samples and Experience: one canvas of left-padded prompts and right-padded responses.

Column c of `sequences` is a prompt token up to P and a response token from P on; a per-action
tensor [B, A] has the response's i-th token in column i. `rftmega.core.types` starts its rows at
column 0 and aligns with targets: the functions at the end convert between the two. Positions are
derived from lengths, never from token values.
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
    """Moves a tensor, or a list of them, to `device`."""
    return [to(each, device) for each in tensor] if isinstance(tensor, list) else tensor.to(device)


def pin_memory(tensor: Tensor | list[Tensor]) -> Any:
    """Copies a tensor, or a list of them, to page-locked memory, from which copies to a device are
    fast; returns it unchanged without a device.
    """
    if not torch.accelerator.is_available():
        return tensor
    return [pinned(each) for each in tensor] if isinstance(tensor, list) else pinned(tensor)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns `value` with `change` applied to every tensor in it.

    Values other than tensors, or lists or dicts of them, stay unchanged.
    """
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    tensors = (
        isinstance(value, list) and bool(value) and all(isinstance(each, Tensor) for each in value)
    )
    return change(value) if tensors or isinstance(value, Tensor) else value


@dataclass
class Experience:
    """Experience holds a rollout's rows for training: B rows, S columns (the same for all rows), A
    of them for the response.
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
        """Moves every tensor, including those of `info`; returns itself."""
        return self._change(lambda value: to(value, device))

    def pin_memory(self) -> "Experience":
        """Pins every tensor, including those of `info`; returns itself.

        It has no effect on a machine without a device.
        """
        return self._change(pin_memory)

    def _change(self, change: Callable[[Any], Any]) -> "Experience":
        for each in fields(self):
            setattr(self, each.name, _changed(getattr(self, each.name), change))
        return self


@dataclass
class Samples:
    """Samples holds the completions of one rollout, batched ([B, S], padded) or packed (one row of
    all tokens, B sequences one after another).
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
        """Arranges `rows` as a canvas as wide as the longest prompt plus the longest response."""
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
        """Returns the rows, starting at column 0; padding becomes 0.

        Raises ValueError if `action_mask` omits tokens of a response: rows of rftmega can't
        represent that.
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
        """Returns the same samples in one row without padding, except `pad_len` tokens
        at its end.
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
        """Returns the same samples as a canvas of minimal width."""
        found = Samples.of(self.rows(), prompts=self.prompts, labels=self.labels, pad_id=pad_id)
        return self._beside(found)

    def _beside(self, found: "Samples") -> "Samples":
        """Copies the layout-independent fields to other samples of the same rows; returns those."""
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
    """Returns a mask [B, width or the longest]: True in the first lengths[b] columns."""
    return (
        torch.arange(_widest(lengths) if width is None else width, device=lengths.device)
        < lengths[:, None]
    )


def shifted(x: Tensor, by: Tensor, kept: Tensor, fill: float = 0) -> Tensor:
    """Returns out[b, c] = x[b, c + by[b]] where kept[b, c], otherwise `fill`.

    x [B, N], by [B], kept [B, width] bool.
    """
    if not x.shape[1]:
        return x.new_full(kept.shape, fill)
    column = torch.arange(kept.shape[1], device=x.device) + by[:, None]
    return x.gather(1, torch.where(kept, column, 0)).masked_fill(~kept, fill)


def canvas(
    rows: Rows, prompt_width: int, actions: int, *, pad_id: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns (sequences, attention mask), both [B, prompt_width + actions], of rows that start at
    column 0.
    """
    by = rows.prompt_lengths - prompt_width
    column = torch.arange(prompt_width + actions, device=by.device) + by[:, None]
    kept = (column >= 0) & (column < rows.lengths[:, None])
    return shifted(rows.tokens, by, kept, pad_id), kept


def flush(sequences: Tensor, by: Tensor, lengths: Tensor) -> Tensor:
    """Returns [B, longest]: each row of a canvas from its first token, in column by[b], on.

    Columns after its end are 0.
    """
    return shifted(sequences, by, _begun(lengths))


def per_action(x: Tensor, rows: Rows) -> Tensor:
    """Converts [B, T] aligned with targets to [B, A], the response's tokens only.

    0 after the end of a response.

    Raises ValueError for an empty prompt: nothing predicts the first token of its response.
    """
    _refuse_empty(rows.prompt_lengths)
    lengths = rows.lengths - rows.prompt_lengths
    return shifted(x, rows.prompt_lengths - 1, _begun(lengths))


def per_target(x: Tensor, rows: Rows) -> Tensor:
    """Converts [B, A] to [B, T] aligned with targets; 0 outside the response.

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
    """Returns the rows with the images and videos that were given as patches; unchanged if they
    already have images, or none were given.

    Raises ValueError for patches without a `processor`, and if rows and patches don't match.
    """
    if rows.images is not None or not patches:
        return rows
    if processor is None:
        raise ValueError(
            "pixel_values needs the model's processor, which knows the tokens that stand for images. Give both."
        )
    return replace(rows, images=ImageInputs(processor).of_rows(rows, patches))


def rows_of_canvas(sequences: Tensor, attention_mask: Tensor, actions: int) -> Rows:
    """Returns the rows of a canvas whose last `actions` columns are the responses'."""
    prompts = sequences.shape[1] - actions
    prompt_lengths = attention_mask[:, :prompts].bool().sum(-1)
    lengths = attention_mask.bool().sum(-1)
    tokens = flush(sequences, prompts - prompt_lengths, lengths)
    return Rows.of_completions(tokens, prompt_lengths, lengths)


def to_experience(padded: Experience, processor: ImageProcessor | None = None) -> types.Experience:
    """Converts to rftmega's Experience. Without info["behaviour_log_probs"] the trainer's log-probs
    replace the engine's.

    `processor`: of a vision-language model, for pixel_values that rftmega did not make. Raises
    ValueError if masks or advantages are missing, if a prompt is empty, or as `with_patches`.
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
    """Converts rftmega's Experience, padded or not, to a canvas.

    Fields that it lacks (kl, and those that are None) are None; so is pixel_values if images are
    files and no `processor` is given.
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
