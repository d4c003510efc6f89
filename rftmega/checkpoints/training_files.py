"""Files of a training checkpoint: each process writes its own files; the first process writes the
manifest when all are complete.

manifest.json         written last: step, states, config, all blocks of tensors with checksums
__<rank>_0.distcp     the blocks that this rank wrote, in torch.distributed.checkpoint's format
rank_<rank>.json      the list of these blocks, and the states of the rank's random streams
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.checkpoints.distributed import Boxed, file_bytes, finish, write_json, write_pieces
from rftmega.checkpoints.reader import Reader, Stored, read_checked
from rftmega.checkpoints.snapshot import Snapshot
from rftmega.checkpoints.state_split import Tensors, joined
from rftmega.core.errors import CheckpointError
from rftmega.core.shards import ShardBox

KIND = "training"
FIRST_READ = 6  # earlier formats use Megatron's tensor names
POLL = 0.05  # seconds
READERS = 4  # threads: some read while others verify
BUSY = 0.1  # share of the time spent writing; the rest is left to training


def note_of(rank: int) -> str:
    return f"rank_{rank}.json"


def write_rank(
    folder: Path,
    rank: int,
    snapshot: Snapshot,
    random: dict[str, Any],
    beside: Tensors | None,
    rest: Callable[[float], object],
) -> None:
    """Writes the files of rank `rank`: the blocks of `snapshot` and the additional tensors
    `beside`, then rank_<rank>.json with `random`, the states of the random number generators.
    Between blocks it calls `rest` with a number of seconds to pause, so that training is not
    slowed.
    """
    snapshot = snapshot.beside(joined(beside or {}))
    boxes = _with_rests(snapshot.boxes, rest)
    stored = write_pieces(folder / f"__{rank}_0.distcp", boxes, size=file_bytes(snapshot.boxes))
    said = {
        "random": random,
        "pieces": [box.as_json() for box in stored],
        "shapes": snapshot.shapes,
    }
    write_json(folder / note_of(rank), said)


def _with_rests(boxes: Iterable[Boxed], rest: Callable[[float], object]) -> Iterator[Boxed]:
    """Yields the blocks (boxes) and pauses after each by calling `rest` with a number of seconds:
    disk writes slow a training step, so the writes are distributed over several steps.
    """
    for box in boxes:
        begin = time.perf_counter()
        yield box
        rest((1 / BUSY - 1) * (time.perf_counter() - begin))


def write_whole(
    folder: Path, ranks: int, about: dict[str, Any], *, given_up: Callable[[], bool]
) -> bool:
    """Waits until all `ranks` ranks have written their files, then writes the manifest, which
    includes the content `about`.

    Returns True when the manifest is written, False if `given_up` returned True before.
    """
    notes = [folder / note_of(rank) for rank in range(ranks)]
    while not all(note.is_file() for note in notes):
        if given_up():
            return False
        time.sleep(POLL)
    stored: list[Stored] = []
    shapes: dict[str, tuple[int, ...]] = {}
    sums = {}
    for note in notes:
        text = note.read_bytes()
        said = json.loads(text)
        stored += map(Stored.from_json, said["pieces"])
        shapes |= {key: tuple(shape) for key, shape in said["shapes"].items()}
        sums[note.name] = hashlib.sha256(text).hexdigest()
    finish(folder, stored, shapes, [], {"kind": KIND, "ranks": sums, **about})
    return True


class TrainingReader(Reader):
    """TrainingReader reads a complete training checkpoint.

    Raises CheckpointError if the folder contains no training checkpoint, or its manifest is damaged
    or of an old format.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        if self.manifest.get("kind") != KIND:
            raise CheckpointError(
                f"{folder} is no training checkpoint: its manifest is of kind {self.manifest.get('kind')!r}."
            )

        if (written := self.manifest["format"]) < FIRST_READ:
            raise CheckpointError(
                f"{folder} is a run's checkpoint of format {written}, whose tensors have names of Megatron; this version goes on "
                f"from format {FIRST_READ}, which every backend reads. Finish that run with the version that wrote it, or start "
                "from an export of it."
            )

    def whole(self, key: str) -> Tensor:
        """Returns the tensor `key`, which one rank wrote as a whole.

        Raises CheckpointError if the tensor is damaged.
        """
        tensor = torch.empty(tuple(self.manifest["shapes"][key]), dtype=self.dtype_of(key))
        self.fill(tensor, key, (0,) * tensor.dim())
        return tensor

    def random_of(self, rank: int) -> dict[str, Any]:
        """Returns the saved states of the random number generators of rank `rank`.

        Raises CheckpointError if the rank's file is damaged.
        """
        name = note_of(rank)
        said: dict[str, Any] = json.loads(
            read_checked(self.folder / name, self.manifest["ranks"][name])
        )["random"]
        return said


class StoredModel:
    """StoredModel reads the model `name` of a training checkpoint. Tensors are identified by the
    keys of their ShardBoxes.
    """

    def __init__(self, reader: TrainingReader, name: str):
        self.reader, self.name = reader, name
        self.said: dict[str, Any] = reader.manifest["models"][name]  # its description, and counters

    def __contains__(self, key: str) -> bool:
        return f"{self.name}/{key}" in self.reader

    def holds(self, kind: str) -> bool:
        """Returns whether the checkpoint has tensors of the model whose keys begin with "<kind>/",
        such as "average/" for the moving average of the weights.
        """
        return any(key.startswith(f"{self.name}/{kind}/") for key in self.reader.stored)

    def fill(self, boxes: Iterable[ShardBox]) -> None:
        """Reads the blocks `boxes` of this process from the checkpoint into their tensors.

        Raises CheckpointError if a block is missing, has another shape, or is damaged.
        """
        with ThreadPoolExecutor(READERS) as pool:
            for _ in pool.map(self._fill, boxes):
                pass

    @torch.no_grad()
    def _fill(self, box: ShardBox) -> None:
        # Not straight into the tensor: a storage that NumPy has viewed can't be resized, and
        # offloading frees storages by resizing them.
        read = torch.empty_like(box.tensor, device="cpu")
        key = f"{self.name}/{box.key}"
        self.reader.fill_shard(read, key, box.shape, box.offset, padded=box.padded)
        box.tensor.copy_(read)
