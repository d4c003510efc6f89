"""What Megatron calls the parts of a model in a distributed checkpoint, without holding their contents."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from torch import Tensor

from rftmega.errors import CheckpointError
from rftmega.megatron.binding import Bound

MARK = "metadata.json"  # Megatron's own; a folder without it is no checkpoint to it
MANIFEST = "manifest.json"  # ours: written last
PROGRESS = "progress.jsonl"  # of a conversion that goes on; gone when it is done
FORMAT = 1


@dataclass(frozen=True)
class Piece:
    """A box of one of the checkpoint's tensors, and where it lies in a Megatron tensor of this process.

    Megatron stacks the layers (and experts) of a name into one tensor; gate and up, fused in the model, are two.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]  # of the box: leading ones for the stacked axes
    begin: int  # first element in the Megatron tensor
    stride: tuple[int, ...]  # there, without the leading ones

    def of(self, megatron: Tensor) -> Tensor:
        """The box of a (contiguous) Megatron tensor."""
        local = self.shape[len(self.shape) - len(self.stride) :]
        return megatron.as_strided(local, self.stride, self.begin).reshape(self.shape)


def pieces_of(chunk: Any, bound: Sequence[Bound]) -> tuple[list[list[Piece]], list[str]]:
    """(the pieces of each bound tensor, the names of objects that Megatron expects beside them) of an unsharded model."""
    state = _state_of(chunk)
    apply_factories(state)
    owners = {item.parameter.untyped_storage().data_ptr(): number for number, item in enumerate(bound)}
    pieces: list[list[Piece]] = [[] for _ in bound]
    objects = []
    for entry in nested_values(state):
        if isinstance(entry, ShardedObject):
            objects.append(entry.unique_key)
        elif isinstance(entry, ShardedTensor):
            number = owners[entry.data.untyped_storage().data_ptr()]
            lead = (1,) * entry.prepend_axis_num
            pieces[number].append(
                Piece(
                    entry.key,
                    tuple(entry.global_shape),
                    tuple(entry.global_offset),
                    lead + tuple(entry.local_shape),
                    entry.data.storage_offset() - bound[number].parameter.storage_offset(),
                    tuple(entry.data.stride()),
                )
            )
    for item, found in zip(bound, pieces, strict=True):
        assert sum(piece.of(item.parameter).numel() for piece in found) == item.parameter.numel(), item.hf_names
    return pieces, objects


def load_distributed(chunks: Sequence[Any], folder: Path) -> None:
    """Fills the chunks from a distributed checkpoint of any layout; each process reads what overlaps its shards.

    Raises CheckpointError where the checkpoint lacks a tensor or has it in another shape.
    """
    read_manifest(folder)
    # All chunks at once: Megatron checks that the processes together ask for every piece.
    states = {str(number): _state_of(chunk) for number, chunk in enumerate(chunks)}
    try:
        loaded = dist_checkpointing.load(states, str(folder))
    except (KeyError, dist_checkpointing.core.CheckpointingException) as error:
        raise CheckpointError(f"{folder} does not hold this model: {error}") from error
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[str(number)], strict=True)


def _state_of(chunk: Any) -> Any:
    """Megatron's description of a chunk's tensors. It asks a last stage for its output head, which a value model has not."""
    last = chunk.post_process
    chunk.post_process = last and hasattr(chunk, "output_layer")
    try:
        return chunk.sharded_state_dict()
    finally:
        chunk.post_process = last


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError where it is missing (so the checkpoint is not whole) or of another format."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it is no checkpoint of ours, or its conversion did not end. Run it again."
        )
    manifest = json.loads(path.read_text())
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is of format {manifest.get('format')}; this version reads {FORMAT}.")
    return manifest


def is_distributed(folder: str | Path) -> bool:
    """Whether a folder is, or was to become, a distributed checkpoint."""
    return any((Path(folder) / name).exists() for name in (MARK, PROGRESS)) and not any(Path(folder).glob("*.safetensors"))
