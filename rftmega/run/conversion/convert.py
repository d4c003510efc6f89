"""Converts between Hugging Face folders and Megatron's distributed checkpoints: streaming,
resumable, without a GPU.
"""

import hashlib
import math
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.backends.megatron.binding import Bound, bind
from rftmega.backends.megatron.load import HEAD, HEADS, refuse_another_head, refuse_strangers
from rftmega.backends.megatron.sharded import CheckpointBox, pieces_of
from rftmega.checkpoints.distributed import finish, write_manifest, write_pieces
from rftmega.checkpoints.reader import MANIFEST, PROGRESS, Reader, Stored, is_distributed
from rftmega.config import ParallelConfig
from rftmega.converters import (
    Replicated,
    Rule,
    Vocabulary,
    assemble,
    flattened,
    left_out,
    located,
    padded_vocabulary,
    shard_shape,
    stacks_of,
    table,
)
from rftmega.converters.vision import embedding_name
from rftmega.core.errors import CheckpointError, ConfigError
from rftmega.model_providers.builder import build_chunk, transformer_config
from rftmega.model_providers.description import describe, layout_violations
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.model_providers.value_head import ValueHead
from rftmega.models.hf.checksums import files_of, sum_of, write_sums
from rftmega.models.hf.hf_folder import (
    HFFolder,
    PlannedTensor,
    checksum,
    copy_companions,
    shards_of,
    write_index,
    write_shard,
)
from rftmega.models.hf.stacked_files import Stacking, open_folder
from rftmega.run.conversion.memory_budget import SPARE, Room, side_by_side
from rftmega.run.conversion.target_folder import (
    FILE_BYTES,
    Progress,
    begin,
    fingerprint,
    note,
    written_alone,
)
from rftmega.runtime.parallel.topology import Topology

# Dense tensors are always cut so finely that each of up to FINEST tensor-parallel ranks (a divisor
# of it) reads only its own share.
FINEST = 8
OF_LAYER = re.compile(r"model\.layers\.\d+\.")


class SourceModel:
    """SourceModel holds the weight conversion rules and the Megatron modules of a model, without
    loading its weights.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, *, value_head: bool, head_bias: bool):
        self.hf_config = read_hf_config(folder)
        self.description = describe(self.hf_config)
        rules = table(self.hf_config, value_head=value_head)
        self.rules = [rule for rule in rules if head_bias or rule.megatron != ("value_head.bias",)]
        config = transformer_config(self.description, ParallelConfig(), dtype)
        config.perform_initialization = False  # pages that are never written take no memory
        topology = Topology.create(ParallelConfig(), seed=0)
        with topology.active():
            self.chunk = build_chunk(
                self.description, config, pre_process=True, post_process=True, head=not value_head
            )
            if value_head:
                self.chunk.value_head = ValueHead(config, bias=head_bias)
        self.experts = self.description.experts.number if self.description.experts else 0
        self.bound = bind([self.chunk], self.rules, topology, experts=self.experts)
        with topology.active():
            self.pieces, self.objects = pieces_of([self.chunk], self.bound)


def to_megatron(
    source: Path, target: Path, parallel: ParallelConfig, *, progress: Progress = lambda _: None
) -> str | None:
    """Converts an HF folder to a distributed checkpoint. Tensors are split into stored blocks such
    that every rank of the layout `parallel` reads whole blocks. Resumes an interrupted conversion.

    `progress`: called with the number of bytes finished since the last call. Returns a text about
    the changes made to config.json, or None if there are none.

    Raises CheckpointError if the tensors of `source` do not match its config.json, ConfigError for
    an impossible layout.
    """
    hf_config = read_hf_config(source)
    files = open_folder(source, hf_config)
    value_head = "score.weight" in files
    dtype = files.dtype_of(embedding_name(table(hf_config)))
    model = SourceModel(source, dtype, value_head=value_head, head_bias="score.bias" in files)
    if problems := layout_violations(model.description, parallel):
        raise ConfigError(
            "This layout is impossible:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )
    unread = HEADS if value_head else frozenset({HEAD} if model.description.tied else ())
    refuse_strangers(files, model.rules, model.hf_config, experts=model.experts, allowed=unread)
    if model.description.tied and not value_head:
        refuse_another_head(files, model.bound)
    refuse_mixed(files, model)
    layout = {
        name: value
        for name, value in asdict(parallel).items()
        if value != getattr(ParallelConfig(), name)
    }
    job = {
        "source": fingerprint(files),
        "layout": layout,
        "value_head": value_head,
        "head_bias": "score.bias" in files,
    }
    with written_alone(target):
        finished = begin(target, job)
        stored: list[Stored] = []
        sums: dict[str, str] = {}
        room = Room(max(item.parameter.nbytes for item in model.bound) + SPARE)

        def convert(numbered: tuple[int, list[tuple[Bound, int]]]) -> dict[str, Any]:
            number, group = numbered
            name = f"__{number}_0.distcp"
            if name in finished:
                return finished[name]
            read: dict[str, str] = {}
            # frees its memory budget if it fails
            with closing(_boxes(files, group, model.pieces, parallel, read, room)) as stream:
                boxes = write_pieces(target / name, stream)
            said = {"file": name, "pieces": [asdict(box) for box in boxes], "tensors": read}
            note(target, said)
            return said

        groups = list(enumerate(_groups(model.bound)))
        for (_, group), said in zip(groups, side_by_side(convert, groups), strict=True):
            stored += [
                Stored(**{**box, "offset": tuple(box["offset"]), "shape": tuple(box["shape"])})
                for box in said["pieces"]
            ]
            sums |= said["tensors"]
            progress(sum(item.parameter.nbytes for item, _ in group))
        changed = copy_companions(source, target, {})
        shapes = {piece.key: piece.global_shape for pieces in model.pieces for piece in pieces}
        finish(target, stored, shapes, model.objects, {"kind": "megatron", **job, "tensors": sums})
        (target / PROGRESS).unlink()
    return changed


def refuse_mixed(files: HFFolder, model: SourceModel) -> None:
    """Raises CheckpointError if tensors of the HF folder `files` that form one Megatron tensor, or
    that Megatron stacks into one, differ in dtype.
    """
    first: dict[str, str] = {}
    for item, pieces in zip(model.bound, model.pieces, strict=True):
        for name in (
            item.hf_names if not item.rule.optional else filter(files.__contains__, item.hf_names)
        ):
            like = first.setdefault(pieces[0].key, name)
            for other in (item.hf_names[0], like):
                if files.dtype_of(name) != files.dtype_of(other):
                    raise CheckpointError(
                        f"{files.folder}: {name} is of {files.dtype_of(name)} and {other} of {files.dtype_of(other)}, and they "
                        "are parts of one tensor of Megatron's. Convert the folder to one dtype first."
                    )


def to_hf(source: Path, target: Path, *, progress: Progress = lambda _: None) -> str | None:
    """Converts a distributed checkpoint to an HF folder, one tensor at a time. Resumes an
    interrupted conversion.

    `progress`: called with the number of bytes finished since the last call. Returns a text about
    the changes made to config.json, or None if there are none.
    """
    tensors = CheckpointTensors(source)
    job = {"source": hashlib.sha256((source / MANIFEST).read_bytes()).hexdigest()}
    with written_alone(target):
        finished = begin(target, job)
        stacking = Stacking(stacks_of(tensors.model.hf_config))
        shards = shards_of(stacking.planned(tensors.planned), FILE_BYTES)
        sums: dict[str, str] = {}
        of_files: dict[str, str] = {}
        room = Room(2 * max(tensor.bytes for tensor in tensors.planned))

        def convert(file: str) -> dict[str, Any]:
            if "sum" in finished.get(file, {}):
                return finished[file]
            names = stacking.matrices(tensor.name for tensor in shards[file])
            with closing(tensors.named(names, room)) as stream:
                written = write_shard(target / file, shards[file], stacking.stacked(stream))
                said = {"file": file, "tensors": written.tensors, "sum": f"xxh3:{written.file}"}
            note(target, said)
            return said

        for said in side_by_side(convert, shards):
            sums |= said["tensors"]
            of_files[said["file"]] = said["sum"]
            progress(sum(tensor.bytes for tensor in shards[said["file"]]))
        changed = copy_companions(source, target, shards)
        write_index(target, shards)
        others = {
            path.name: sum_of(path, "xxh3")
            for path in files_of(target)
            if path.name not in of_files
        }
        write_sums(target, of_files | others)
        write_manifest(target, {"kind": "huggingface", **job, "tensors": sums})
        (target / PROGRESS).unlink()
    return changed


def verify(first: Path, second: Path, *, progress: Progress = lambda _: None) -> int:
    """Compares by checksum all tensors of two folders, each a Hugging Face folder or a distributed
    checkpoint. Returns the number of tensors in each folder.

    `progress`: called with the bytes of each tensor read. Raises CheckpointError if names, shapes,
    dtypes or contents differ; the error names the first tensor that differs.
    """
    a, b = (tensors_of(folder) for folder in (first, second))
    names = [{tensor.name: tensor for tensor in side.planned} for side in (a, b)]
    if odd := sorted(names[0].keys() ^ names[1].keys()):
        raise CheckpointError(
            f"Only one of {first} and {second} holds {odd[0]!r} ({len(odd)} such)."
        )
    for name, one in names[0].items():
        if one != names[1][name]:
            raise CheckpointError(f"{name} is {one} in {first} and {names[1][name]} in {second}.")
    found = [{name: checksum(tensor) for name, tensor in side.all(progress)} for side in (a, b)]
    if wrong := [name for name in found[0] if found[0][name] != found[1][name]]:
        raise CheckpointError(
            f"{len(wrong)} of {len(found[0])} tensors differ between {first} and {second}: {wrong[0]!r} first."
        )
    return len(found[0])


class FolderTensors:
    """FolderTensors reads the tensors of an HF folder; `left_out` are the names of the tensors in
    the folder that a conversion omits.
    """

    def __init__(self, folder: Path):
        hf_config = read_hf_config(folder)
        self.files = open_folder(folder, hf_config)
        self.left_out = left_out(hf_config, self.files.names)
        if flattened(hf_config).get("tie_word_embeddings") and HEAD in self.files:
            self.left_out.add(HEAD)
        self.planned = [
            PlannedTensor(name, self.files.dtype_of(name), self.files.shape_of(name))
            for name in sorted(self.files.names)
            if name not in self.left_out
        ]

    def all(self, progress: Progress) -> Iterator[tuple[str, Tensor]]:
        for name, _, shape in self.planned:
            tensor = self.files.whole(name, shape)
            yield name, tensor
            progress(tensor.nbytes)


class CheckpointTensors:
    """CheckpointTensors reads a distributed checkpoint's tensors under their Hugging Face names."""

    def __init__(self, folder: Path):
        """Raises CheckpointError if the checkpoint is incomplete."""
        self.reader = Reader(folder)
        manifest = self.reader.manifest
        dtype = self.reader.dtype_of("embedding.word_embeddings.weight")
        self.model = SourceModel(
            folder, dtype, value_head=manifest["value_head"], head_bias=manifest["head_bias"]
        )
        self._exported = [
            (item, pieces)
            for item, pieces in zip(self.model.bound, self.model.pieces, strict=True)
            if item.rule.exported
        ]
        self.planned = [
            PlannedTensor(name, self.reader.dtype_of(pieces[0].key), tuple(tensor.shape))
            for item, pieces in self._exported
            for name, tensor in zip(item.hf_names, item.rule.hf, strict=True)
        ]

    def named(self, names: set[str], room: Room) -> Generator[tuple[str, Tensor], None, None]:
        """Yields (name, tensor) for each of `names`, in the order of `planned`.

        `room`: the memory budget that the tensors are taken from.
        """
        for item, pieces in self._exported:
            if names.isdisjoint(item.hf_names):
                continue
            with room.of(2 * item.parameter.nbytes):
                whole = torch.empty(item.parameter.shape, dtype=self.reader.dtype_of(pieces[0].key))
                for piece in pieces:
                    self.reader.fill_shard(
                        piece.of(whole), piece.key, piece.global_shape, piece.offset, padded=False
                    )
                parts = assemble(item.rule, [whole], alias=True)
                yield from (
                    (name, part)
                    for name, part in zip(item.hf_names, parts, strict=True)
                    if name in names
                )
                del whole, parts

    def all(self, progress: Progress) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.named({planned.name for planned in self.planned}, Room(0)):
            yield name, tensor
            progress(tensor.nbytes)


def told_left_out(folder: Path) -> str | None:
    """Returns a text that lists the tensors that a conversion of `folder` omits, or None if it
    omits none. A layer omitted as a whole is one entry, and so are tensors that recur in each
    layer.
    """
    if is_distributed(folder):
        return None
    tensors = FolderTensors(folder)
    stay = {layer[0] for each in tensors.planned if (layer := OF_LAYER.match(each.name))}
    found: dict[str, list[str]] = {}
    for name in sorted(tensors.left_out):
        layer = OF_LAYER.match(name)
        whole = f"{layer[0]}*" if layer and layer[0] not in stay else ""
        found.setdefault(whole or OF_LAYER.sub("", name), []).append(whole or name)
    said = [
        names[0] if len(names) == 1 else f"{names[0]} ({len(names)} {_kind(names)})"
        for names in found.values()
    ]
    return ", ".join(said) or None


def _kind(names: Sequence[str]) -> str:
    return "tensors" if names[0] == names[-1] else "tensors of this name, one a layer"


def tensors_of(folder: Path) -> FolderTensors | CheckpointTensors:
    return CheckpointTensors(folder) if is_distributed(folder) else FolderTensors(folder)


def _groups(bound: list[Bound]) -> Iterator[list[tuple[Bound, int]]]:
    """Splits the tensors `bound` among the files of a checkpoint, each of up to FILE_BYTES. Yields
    one list per file of (tensor, its index in `bound`).
    """
    group: list[tuple[Bound, int]] = []
    size = 0
    for number, item in enumerate(bound):
        if group and size + item.parameter.nbytes > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append((item, number))
        size += item.parameter.nbytes
    yield group


def _boxes(
    files: HFFolder,
    group: list[tuple[Bound, int]],
    pieces: list[list[CheckpointBox]],
    parallel: ParallelConfig,
    sums: dict[str, str],
    room: Room,
) -> Generator[tuple[str, tuple[int, ...], Tensor], None, None]:
    """Yields (key, offset, block) for each block of the checkpoint tensors in `group`; tensors are
    split as the ranks of `parallel` will read them. Adds the checksums of the source tensors to
    `sums`.

    `files`: the source folder; `group`: tensors with their indices in `pieces`; `pieces`: each
    tensor's blocks in a checkpoint of one rank; `sums`: HF name -> checksum; `room`: the memory
    budget.
    """
    for item, number in group:
        with room.of(item.parameter.nbytes):
            whole, found = _read(files, item)
            sums |= found
            for piece in pieces[number]:
                box = piece.of(whole)
                axis = box.dim() - item.parameter.dim() + item.rule.axis
                for start, stop in pairwise(_edges(item.rule, box.shape[axis], parallel)):
                    at = list(piece.offset)
                    at[axis] += start
                    yield piece.key, tuple(at), box.narrow(axis, start, stop - start)
            del whole, box


def _read(files: HFFolder, item: Bound) -> tuple[Tensor, dict[str, str]]:
    """Reads the HF tensors of the unsharded Megatron tensor `item` directly into their rows.
    Returns the Megatron tensor, and the checksum of each HF tensor by name.
    """
    rule = item.rule
    places = list(located(rule, 0, 1))
    dtype = files.dtype_of(item.hf_names[0])
    whole = torch.empty(shard_shape(rule, 0, 1), dtype=dtype)
    sums = {}
    for number, (name, tensor) in enumerate(zip(item.hf_names, rule.hf, strict=True)):
        mine = sorted(
            (start, stop, offset) for (part, start, stop), offset in places if part == number
        )
        assert [start for start, _, _ in mine] == [0, *(stop for _, stop, _ in mine[:-1])], (
            name,
            mine,
        )
        rows = [whole.narrow(rule.axis, offset, stop - start) for start, stop, offset in mine]
        sums[name] = files.fill(rows, name, tuple(tensor.shape))
    held = sum(tensor.shape[rule.axis] for tensor in rule.hf)
    # padding of the vocabulary
    whole.narrow(rule.axis, held, whole.shape[rule.axis] - held).zero_()
    return whole, sums


def _edges(rule: Rule, size: int, parallel: ParallelConfig) -> list[int]:
    """Returns the indices, from 0 to `size`, at which a tensor is cut along its sharded dimension
    (of length `size`) into stored blocks. A block is read whole, for its checksum, so none may span
    the shares of two ranks: neither in the layout `parallel` nor, for non-expert tensors, with a
    divisor of FINEST ranks.
    """
    if isinstance(rule, Replicated):
        return [0, size]
    most = parallel.expert_tensor if rule.per_expert else math.lcm(parallel.tensor, FINEST)
    edges = {0, size}
    for ranks in (ranks for ranks in range(1, most + 1) if most % ranks == 0):
        share = (
            padded_vocabulary(size, ranks) // ranks
            if isinstance(rule, Vocabulary)
            else size / ranks
        )
        if share == int(share):
            edges |= set(range(0, size, int(share)))
    return sorted(edges)
