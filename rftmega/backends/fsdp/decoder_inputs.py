"""Builds the packed or padded inputs of a transformers decoder, and the positions of the target
tokens' hidden states.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rftmega.backends.fsdp.packed_attention import EDGES, Edges
from rftmega.core.shared_prefixes import SortedRows
from rftmega.data.media.model_inputs import ImageTensors
from rftmega.models.kernels.tree_attention import SegmentTree


@dataclass(frozen=True, slots=True)
class Feed:
    """Feed holds the decoder inputs of a micro-batch with N target tokens."""

    arguments: dict[str, Any]  # keyword arguments of the decoder
    places: Tensor  # [N] index of each target's hidden state in the decoder's flattened output
    targets: Tensor  # [N] token ids
    slots: Tensor  # [N] index of each target in the flat [rows * columns] grid; behind it: filler
    rows: int
    columns: int
    # for the results of all M targets, where some are equal: their index among the N [M], and in
    # the flat grid [M]
    copies: tuple[Tensor, Tensor] | None = None

    def in_rows(self, outputs: Tensor) -> Tensor:
        """Scatters outputs [N, ...] of the targets into [B, T, ...], leaving out the filler token of
        an empty micro-batch.

        Differentiable even without targets, so that the backward pass runs through every layer.
        """
        size, slots = self.rows * self.columns, self.slots
        if self.copies is not None:
            chosen, slots = self.copies
            outputs = outputs[chosen]
        canvas = outputs.new_zeros(
            size + 1, *outputs.shape[1:]
        )  # the last element takes the filler
        return canvas.index_put((slots,), outputs)[:size].unflatten(0, (self.rows, self.columns))


def feed(
    tokens: Tensor,
    lengths: Tensor,
    *,
    packed: bool,
    where: torch.device,
    images: ImageTensors | None = None,
    needed: Tensor | None = None,
    sorted_rows: SortedRows | None = None,
) -> Feed:
    """Builds decoder inputs on device `where` from tokens [B, T + 1] on the host, with `lengths`
    real tokens per row; a row's last token is only a target.

    `packed`: rows are concatenated, and attention gets their boundaries (`Edges`). Otherwise rows
    are padded: filler is at their ends, which the earlier tokens of a causal decoder never attend
    to, so no mask is needed. A batch without targets becomes one filler token. `images`: image
    inputs of a vision-language model, which requires packed rows; they are never empty. `needed`
    [B, T] on the host: the targets to compute; None: all. `sorted_rows`: packed rows share the
    tokens of common beginnings; None: they don't.
    """
    rows, columns = tokens.shape[0], tokens.shape[1] - 1
    real = torch.arange(columns) < lengths[:, None] - 1
    if not bool(real.any()):
        real, tokens = torch.zeros(1, 1, dtype=torch.bool), tokens.new_zeros(1, 2)
        slots, targets = torch.tensor([rows * columns]), tokens.new_zeros(1)
        grid, counts = torch.ones(1, 1, dtype=torch.bool), torch.ones(1, dtype=torch.int64)
    else:
        slots, targets = real.flatten().nonzero()[:, 0], tokens[:, 1:][real]
        grid, counts = real, real.sum(1)
    width = int(counts.max())
    ids, grid = tokens[:, :-1][:, :width], grid[:, :width]
    positions = torch.arange(width).expand(len(ids), -1)
    copies = None
    if packed:
        if sorted_rows is not None and width:
            shared = sorted_rows.packed(width)
            edges = Edges(
                [0, *(segment.stop for segment in shared.segments)], SegmentTree(shared.segments)
            )
            chosen, places = shared.slots, shared.places[shared.places >= 0]
            if needed is None:
                once = shared.predictions(width)
                order = torch.empty_like(
                    shared.places
                )  # of the targets, by their index in the grid
                order[once.present] = torch.arange(len(places))
                copies = once.copies, slots
                places, kept = once.places, order[once.slots]
                targets, slots = targets[kept], slots[kept]
        else:
            edges = Edges([0, *counts[counts > 0].cumsum(0).tolist()])
            chosen = grid.flatten().nonzero()[:, 0]
            places = torch.arange(len(chosen))
        arguments = {
            "input_ids": _sent(ids.flatten()[chosen][None], where),
            "position_ids": _sent(positions.flatten()[chosen][None], where),
            EDGES: edges,
        }
        if images is not None:
            arguments |= _seen(images, grid.shape, chosen, where)
    else:
        arguments = {
            "input_ids": _sent(ids.where(grid, 0), where),
            "position_ids": _sent(positions, where),
        }
        places = grid.flatten().nonzero()[:, 0]
    if needed is not None:
        places, targets, slots = _only(needed, places, targets, slots)
    places, targets, slots = (_sent(index, where) for index in (places, targets, slots))
    if copies is not None:
        copies = _sent(copies[0], where), _sent(copies[1], where)
    return Feed(arguments, places, targets, slots, rows, columns, copies)


def _only(
    needed: Tensor, places: Tensor, targets: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns places, targets and slots of the targets that are True in `needed` [B, T]; without any,
    those of the first target, as filler.
    """
    marks = torch.cat([needed.reshape(-1), needed.new_zeros(1)])[slots]
    if bool(marks.any()):
        return places[marks], targets[marks], slots[marks]
    return places[:1], targets[:1], torch.full_like(slots[:1], needed.numel())


def _sent(value: Tensor, where: torch.device) -> Tensor:
    """Returns a copy of the value on device `where`, made without blocking the host."""
    return value.to(where, non_blocking=True)


def _seen(
    images: ImageTensors, grid: torch.Size, chosen: Tensor, where: torch.device
) -> dict[str, Tensor]:
    """Returns the model inputs of a vision-language model on device `where`: the vision encoder's
    patches and grids, and positions [3, 1, N] and feature indices [1, N] of the tokens at the
    indices `chosen` [N] of the flat grid of shape `grid`, [rows, columns].
    """
    assert images.pixels is not None
    assert images.grids is not None
    rows, width = grid
    filler = not images.features.numel()  # no row, or none with a target
    positions = torch.zeros(1, 1, 3, dtype=torch.int64) if filler else images.positions
    features = torch.zeros(1, 1, dtype=torch.int64) if filler else images.features
    found = {
        "position_ids": positions[:rows, :width].flatten(0, 1)[chosen].T[:, None],
        "features": features[:rows, :width].flatten()[chosen][None],
        "pixels": images.pixels,
        "grids": images.grids,
    }
    return {name: _sent(given, where) for name, given in found.items()}
