"""Between Hugging Face folders and Megatron's distributed checkpoints: as a stream, resumable, without a GPU."""

import ctypes
import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from converters import Replicated, Rule, Vocabulary, assemble, left_out, located, padded_vocabulary, shard_shape, table
from converters.hf_folder import (
    HFFolder,
    Planned,
    checksum,
    copy_companions,
    shards_of,
    write_index,
    write_shard,
)
from model_providers.builder import build_chunk, transformer_config
from model_providers.description import describe, layout_violations
from model_providers.hf_config import read_hf_config
from model_providers.value_head import ValueHead
from rftmega.checkpoint.distributed import finish, write_manifest, write_pieces
from rftmega.config import ParallelConfig
from rftmega.errors import CheckpointError, ConfigError
from rftmega.megatron.binding import Bound, bind
from rftmega.megatron.load import HEAD, refuse_another_head, refuse_strangers
from rftmega.megatron.sharded import Piece, pieces_of
from rftmega.megatron.stored import MANIFEST, PROGRESS, Reader, Stored, is_distributed
from rftmega.parallel.topology import Topology

FINEST = 8  # tensor-parallel ranks (and every divisor) that read no more of a dense tensor than they hold, whatever was given
FILE_BYTES = 512 * 2**20
SPARE = 128 * 2**20  # bytes
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h
Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int], object]  # told the bytes that are done


class Model:
    """A family's table and Megatron's names for a model of which no weight is in memory."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, value_head: bool, head_bias: bool):
        self.hf_config = read_hf_config(folder)
        self.description = describe(self.hf_config)
        rules = table(self.hf_config, value_head=value_head)
        self.rules = [rule for rule in rules if head_bias or rule.megatron != ("value_head.bias",)]
        config = transformer_config(self.description, ParallelConfig(), dtype)
        config.perform_initialization = False  # memory that nobody writes to costs nothing
        topology = Topology.create(ParallelConfig(), seed=0)
        with topology.active():
            self.chunk = build_chunk(self.description, config, pre_process=True, post_process=True, head=not value_head)
            if value_head:
                self.chunk.value_head = ValueHead(config, bias=head_bias)
        self.experts = self.description.experts.number if self.description.experts else 0
        self.bound = bind([self.chunk], self.rules, topology, experts=self.experts)
        with topology.active():
            self.pieces, self.objects = pieces_of([self.chunk], self.bound)


def to_megatron(source: Path, target: Path, parallel: ParallelConfig, *, progress: Progress = lambda _: None) -> None:
    """HF folder -> distributed checkpoint, in pieces that ranks of `parallel` read whole. Resumes what was broken off.

    Raises CheckpointError for a folder that its config.json does not describe, ConfigError for a layout that can't be.
    """
    files = HFFolder(source)
    value_head = "score.weight" in files
    dtype = files.dtype_of("model.embed_tokens.weight")
    model = Model(source, dtype, value_head=value_head, head_bias="score.bias" in files)
    if problems := layout_violations(model.description, parallel):
        raise ConfigError("This layout is impossible:\n" + "\n".join(f"  - {problem}" for problem in problems))
    unread = frozenset({HEAD} if model.description.tied or value_head else ())
    refuse_strangers(files, model.rules, model.hf_config, experts=model.experts, allowed=unread)
    if model.description.tied and not value_head:
        refuse_another_head(files, model.bound)
    layout = {name: value for name, value in asdict(parallel).items() if value != getattr(ParallelConfig(), name)}
    job = {"source": fingerprint(files), "layout": layout, "value_head": value_head, "head_bias": "score.bias" in files}
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
        boxes = write_pieces(target / name, _boxes(files, group, model.pieces, parallel, read, room))
        said = {"file": name, "pieces": [asdict(box) for box in boxes], "tensors": read}
        note(target, said)
        return said

    groups = list(enumerate(_groups(model.bound)))
    for (_, group), said in zip(groups, side_by_side(convert, groups), strict=True):
        stored += [Stored(**{**box, "offset": tuple(box["offset"]), "shape": tuple(box["shape"])}) for box in said["pieces"]]
        sums |= said["tensors"]
        progress(sum(item.parameter.nbytes for item, _ in group))
    copy_companions(source, target)
    shapes = {piece.key: piece.global_shape for pieces in model.pieces for piece in pieces}
    finish(target, stored, shapes, model.objects, {"kind": "megatron", **job, "tensors": sums})
    (target / PROGRESS).unlink()


def to_hf(source: Path, target: Path, *, progress: Progress = lambda _: None) -> None:
    """Distributed checkpoint -> HF folder, one tensor at a time. Resumes what was broken off."""
    tensors = CheckpointTensors(source)
    job = {"source": hashlib.sha256((source / MANIFEST).read_bytes()).hexdigest()}
    finished = begin(target, job)
    shards = shards_of(tensors.planned, FILE_BYTES)
    sums: dict[str, str] = {}
    room = Room(2 * max(tensor.bytes for tensor in tensors.planned))

    def convert(file: str) -> dict[str, Any]:
        if file in finished:
            return finished[file]
        names = {tensor.name for tensor in shards[file]}
        said = {"file": file, "tensors": write_shard(target / file, shards[file], tensors.named(names, room))}
        note(target, said)
        return said

    for said in side_by_side(convert, shards):
        sums |= said["tensors"]
        progress(sum(tensor.bytes for tensor in shards[said["file"]]))
    copy_companions(source, target)
    write_index(target, shards)
    write_manifest(target, {"kind": "huggingface", **job, "tensors": sums})
    (target / PROGRESS).unlink()


def verify(first: Path, second: Path, *, progress: Progress = lambda _: None) -> int:
    """Compares every tensor of two folders of either kind, byte by byte; how many there are.

    Raises CheckpointError, naming the tensor, at the first difference.
    """
    a, b = (tensors_of(folder) for folder in (first, second))
    names = [{tensor.name: tensor for tensor in side.planned} for side in (a, b)]
    if odd := sorted(names[0].keys() ^ names[1].keys()):
        raise CheckpointError(f"Only one of {first} and {second} holds {odd[0]!r} ({len(odd)} such).")
    for name, one in names[0].items():
        if one != names[1][name]:
            raise CheckpointError(f"{name} is {one} in {first} and {names[1][name]} in {second}.")
    found = [{name: checksum(tensor) for name, tensor in side.all(progress)} for side in (a, b)]
    if wrong := [name for name in found[0] if found[0][name] != found[1][name]]:
        raise CheckpointError(f"{len(wrong)} of {len(found[0])} tensors differ between {first} and {second}: {wrong[0]!r} first.")
    return len(found[0])


class Room:
    """Memory that threads share: who asks for more than is left waits, unless nobody has any.

    What is freed stays with the process and is used again: fresh pages take the kernel longer than a copy takes us. Around
    a tensor of more than SPARE it goes back.
    """

    def __init__(self, limit: int):
        self.left = self.limit = limit  # bytes
        self._changed = threading.Condition()
        self._libc = ctypes.CDLL(None)
        if hasattr(self._libc, "mallopt"):  # glibc
            for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_ARENA_MAX, 1)):
                self._libc.mallopt(option, value)

    @contextmanager
    def of(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: size <= self.left or self.left == self.limit)
            self.left -= size
        self._trim(size)
        try:
            yield
        finally:
            self._trim(size)
            with self._changed:
                self.left += size
                self._changed.notify_all()

    def _trim(self, size: int) -> None:
        if size > SPARE and hasattr(self._libc, "malloc_trim"):
            self._libc.malloc_trim(0)


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The results in order; two at a time are made, so that one's disk and the other's processor are busy together."""
    pool = ThreadPoolExecutor(2)
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)


class FolderTensors:
    """The tensors of an HF folder."""

    def __init__(self, folder: Path):
        self.files = HFFolder(folder)
        hf_config = read_hf_config(folder)
        self.planned = [
            Planned(name, self.files.dtype_of(name), self.files.shape_of(name))
            for name in sorted(self.files.names)
            if not left_out(hf_config, name) and not (name == HEAD and hf_config.get("tie_word_embeddings"))
        ]

    def all(self, progress: Progress) -> Iterator[tuple[str, Tensor]]:
        for name, _, shape in self.planned:
            tensor = self.files.whole(name, shape)
            yield name, tensor
            progress(tensor.nbytes)


class CheckpointTensors:
    """The tensors of a distributed checkpoint under their Hugging Face names."""

    def __init__(self, folder: Path):
        """Raises CheckpointError where the checkpoint is not whole."""
        self.reader = Reader(folder)
        manifest = self.reader.manifest
        dtype = self.reader.dtype_of("embedding.word_embeddings.weight")
        self.model = Model(folder, dtype, value_head=manifest["value_head"], head_bias=manifest["head_bias"])
        self._exported = [
            (item, pieces) for item, pieces in zip(self.model.bound, self.model.pieces, strict=True) if item.rule.exported
        ]
        self.planned = [
            Planned(name, self.reader.dtype_of(pieces[0].key), tuple(tensor.shape))
            for item, pieces in self._exported
            for name, tensor in zip(item.hf_names, item.rule.hf, strict=True)
        ]

    def named(self, names: set[str], room: Room) -> Iterator[tuple[str, Tensor]]:
        """Those tensors, in the order of `planned`."""
        for item, pieces in self._exported:
            if names.isdisjoint(item.hf_names):
                continue
            with room.of(2 * item.parameter.nbytes):
                whole = torch.empty(item.parameter.shape, dtype=self.reader.dtype_of(pieces[0].key))
                for piece in pieces:
                    self.reader.fill_shard(piece.of(whole), piece.key, piece.global_shape, piece.offset, padded=False)
                parts = assemble(item.rule, [whole], alias=True)
                yield from ((name, part) for name, part in zip(item.hf_names, parts, strict=True) if name in names)
                del whole, parts

    def all(self, progress: Progress) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.named({planned.name for planned in self.planned}, Room(0)):
            yield name, tensor
            progress(tensor.nbytes)


def tensors_of(folder: Path) -> FolderTensors | CheckpointTensors:
    return CheckpointTensors(folder) if is_distributed(folder) else FolderTensors(folder)


def fingerprint(files: HFFolder) -> str:
    """Of the source: a conversion goes on only where it is the same."""
    said = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files.files]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def begin(target: Path, job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Opens `target`, new or broken off; file -> what was noted of it, for files that are finished.

    PROGRESS says what is converted in its first line, then has one line a finished file.

    Raises CheckpointError where `target` is something else.
    """
    log = target / PROGRESS
    if log.is_file():
        first, *rest = [line for line in log.read_text().split("\n")[:-1] if line]  # a last line without its end is half a line
        if json.loads(first) != job:
            raise CheckpointError(f"{target} is a conversion of something else, broken off. Remove it, or choose another folder.")
        finished = {(said := json.loads(line))["file"]: said for line in rest}
        return {name: said for name, said in finished.items() if (target / name).is_file()}
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} exists and is not empty. Remove it, or choose another folder.")
    target.mkdir(parents=True, exist_ok=True)
    note(target, job)
    return {}


def note(target: Path, said: dict[str, Any]) -> None:
    with (target / PROGRESS).open("ab", buffering=0) as stream:
        stream.write((json.dumps(said) + "\n").encode())  # one write, appended whole: two files may end at once


def _groups(bound: list[Bound]) -> Iterator[list[tuple[Bound, int]]]:
    """(tensor, its number) by files of up to FILE_BYTES."""
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
    pieces: list[list[Piece]],
    parallel: ParallelConfig,
    sums: dict[str, str],
    room: Room,
) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """(key, offset, box), each split as the ranks of `parallel` will ask for it; notes the checksums of what is read."""
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
    """The Megatron tensor of all ranks, each HF tensor read straight to where its rows lie in it; their checksums."""
    rule = item.rule
    places = list(located(rule, 0, 1))
    dtype = files.dtype_of(item.hf_names[0])
    whole = torch.empty(shard_shape(rule, 0, 1), dtype=dtype)
    sums = {}
    for number, (name, tensor) in enumerate(zip(item.hf_names, rule.hf, strict=True)):
        mine = [(start, stop, offset) for (part, start, stop), offset in places if part == number]
        assert [start for start, _, _ in mine] == [0, *(stop for _, stop, _ in mine[:-1])], (name, mine)
        rows = [whole.narrow(rule.axis, offset, stop - start) for start, stop, offset in mine]
        sums[name] = files.fill(rows, name, tuple(tensor.shape))
    held = sum(tensor.shape[rule.axis] for tensor in rule.hf)
    whole.narrow(rule.axis, held, whole.shape[rule.axis] - held).zero_()  # padding of the vocabulary
    return whole, sums


def _edges(rule: Rule, size: int, parallel: ParallelConfig) -> list[int]:
    """Where a tensor is cut. A piece is read whole, for its checksum, so none may straddle two ranks' shares: of the given layout
    or, outside the experts, of FINEST ranks or fewer.
    """
    if isinstance(rule, Replicated):
        return [0, size]
    most = parallel.expert_tensor if rule.per_expert else math.lcm(parallel.tensor, FINEST)
    edges = {0, size}
    for ranks in (ranks for ranks in range(1, most + 1) if most % ranks == 0):
        share = padded_vocabulary(size, ranks) // ranks if isinstance(rule, Vocabulary) else size / ranks
        if share == int(share):
            edges |= set(range(0, size, int(share)))
    return sorted(edges)
