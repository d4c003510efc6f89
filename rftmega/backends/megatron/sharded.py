"""Lists the tensors of a model in a Megatron distributed checkpoint: names and blocks, without
contents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from torch import Tensor

from rftmega.backends.megatron.binding import Bound
from rftmega.checkpoints.reader import Reader


@dataclass(frozen=True)
class CheckpointBox:
    """CheckpointBox is a block of a checkpoint tensor, and its position in a Megatron tensor of
    this process.
    In a checkpoint, Megatron stacks the tensors of all layers (and experts) with one name into one
    tensor; gate and up, fused in the model, are two tensors.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]  # of the block, with leading 1s for the stacked axes
    begin: int  # first element in the Megatron tensor
    stride: tuple[int, ...]  # in the Megatron tensor, without the leading axes
    padded: bool = False  # a vocabulary: its number of rows depends on the layout
    # this process's indices among equal holders: pipeline, tensor, data parallel
    replica: tuple[int, int, int] = (0, 0, 0)

    def of(self, megatron: Tensor) -> Tensor:
        """Returns a view of the block in a contiguous Megatron tensor, which may be a view of a
        larger buffer.
        """
        local = self.shape[len(self.shape) - len(self.stride) :]
        return megatron.as_strided(local, self.stride, megatron.storage_offset() + self.begin).view(
            self.shape
        )


def pieces_of(
    chunks: Sequence[Any], bound: Sequence[Bound]
) -> tuple[list[list[CheckpointBox]], list[str]]:
    """Returns (the CheckpointBoxes of each bound tensor, the names of further objects that Megatron
    expects in a checkpoint) for this process's chunks.
    Call it before the chunks are wrapped, while each tensor has separate memory.
    """
    states = [_state_of(chunk) for chunk in chunks]
    for state in states:
        apply_factories(state)
    owners = {
        item.parameter.untyped_storage().data_ptr(): number for number, item in enumerate(bound)
    }
    pieces: list[list[CheckpointBox]] = [[] for _ in bound]
    objects = []
    for entry in (entry for state in states for entry in nested_values(state)):
        if isinstance(entry, ShardedObject):
            objects.append(entry.unique_key)
        elif isinstance(entry, ShardedTensor):
            number = owners[entry.data.untyped_storage().data_ptr()]
            lead = (1,) * entry.prepend_axis_num
            pieces[number].append(
                CheckpointBox(
                    entry.key,
                    tuple(entry.global_shape),
                    tuple(entry.global_offset),
                    lead + tuple(entry.local_shape),
                    entry.data.storage_offset() - bound[number].parameter.storage_offset(),
                    tuple(entry.data.stride()),
                    entry.allow_shape_mismatch,
                    entry.replica_id,
                )
            )
    for item, found in zip(bound, pieces, strict=True):
        assert sum(piece.of(item.parameter).numel() for piece in found) == item.parameter.numel(), (
            item.hf_names
        )
    return pieces, objects


@torch.no_grad()
def load_distributed(chunks: Sequence[Any], folder: Path, bound: Sequence[Bound]) -> None:
    """Fills the chunks from a distributed checkpoint, whatever layout wrote it; each process reads
    the parts of tensors that overlap its shards.
    Raises CheckpointError if the checkpoint lacks a tensor, contains it in another shape, or is
    corrupt.
    """
    reader = Reader(folder)
    owners = {item.parameter.untyped_storage().data_ptr(): item for item in bound}
    filled = set()
    for chunk in chunks:
        state = _state_of(chunk)
        apply_factories(state)
        for entry in nested_values(state):
            if not isinstance(entry, ShardedTensor):
                continue
            item = owners[entry.data.untyped_storage().data_ptr()]
            filled.add(id(item))
            if not (item.rule.optional and entry.key not in reader):
                target = entry.data[(None,) * entry.prepend_axis_num]
                # the tensor itself must stay resizable for offloading
                read = torch.empty_like(target, device="cpu")
                reader.fill_shard(
                    read,
                    entry.key,
                    entry.global_shape,
                    entry.global_offset,
                    padded=entry.allow_shape_mismatch,
                )
                target.copy_(read)
    assert filled == {id(item) for item in bound}, (
        "Megatron names no place in a checkpoint for some parameters"
    )


def _state_of(chunk: Any) -> Any:
    """Returns Megatron's sharded state dict of a chunk.

    For the last stage Megatron would access the LM head, which a value model lacks; this is
    prevented.
    """
    last = chunk.post_process
    chunk.post_process = last and hasattr(chunk, "output_layer")
    try:
        return chunk.sharded_state_dict()
    finally:
        chunk.post_process = last
