"""Hugging Face model folders: safetensors files read by slice or by tensor, and written as a
stream.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rftmega.converters import written
from rftmega.converters.block_scales import FIELD
from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import NotJSON, parse_json, read_json_object, read_weight_map

INDEX = "model.safetensors.index.json"
WEIGHTS = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".distcp",
    ".part",
}
# Files that describe a folder's weights rather than the model: each folder has its own.
CHECKSUMS = "checksums.json"  # of the files
OF_WEIGHTS = {CHECKSUMS, "manifest.json", "progress.jsonl", "metadata.json", ".metadata"}
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")
CODES = {dtype: code for code, dtype in DTYPES.items()} | {torch.float8_e4m3fn: "F8_E4M3"}


class PlannedTensor(NamedTuple):
    """PlannedTensor describes a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class HFFolder:
    """HFFolder reads the safetensors files of a model folder, opened lazily and once each."""

    def __init__(self, folder: str | Path):
        """Raises CheckpointError if the folder holds no weights."""
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}
        index = self.folder / INDEX
        if os.path.lexists(index):
            self._file_of = read_weight_map(index)
        else:
            self._file_of = self._names_of(
                sorted(path.name for path in self.folder.glob("*.safetensors"))
            )

    def _names_of(self, files: list[str]) -> dict[str, str]:
        """Returns tensor -> file of a folder without an index."""
        if not files:
            raise CheckpointError(f"{self.folder} holds no *.safetensors weights.")
        found: dict[str, str] = {}
        for file in files:
            for name in self._file(file).keys():  # noqa: SIM118
                if name in found:
                    raise CheckpointError(
                        f"{self.folder}: {found[name]} and {file} both hold {name!r}, and no {INDEX} says which counts. Remove "
                        "one of the files, or add the index."
                    )
                found[name] = file
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> Iterable[str]:
        return self._file_of

    @property
    def files(self) -> list[Path]:
        return [self.folder / name for name in sorted(set(self._file_of.values()))]

    @property
    def elements(self) -> int:
        """Returns the number of elements of all tensors."""
        return sum(math.prod(self.shape_of(name)) for name in self.names)

    def slice_of(self, name: str, shape: tuple[int, ...]) -> Any:
        """Returns a lazy slice of tensor `name`.

        Raises CheckpointError if it is missing or of another shape.
        """
        file = self._holder(name)
        self.dtype_of(name)
        found = self._file(file).get_slice(name)
        self._check_shape(name, tuple(found.get_shape()), shape)
        return found

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Reads tensor `name` into memory of its own: a mapped file would stay resident.

        Raises CheckpointError as `slice_of` does.
        """
        tensor = torch.empty(shape, dtype=self.dtype_of(name))
        self.fill([tensor], name, shape)
        return tensor

    def fill(self, targets: Sequence[Tensor], name: str, shape: tuple[int, ...]) -> str:
        """Reads tensor `name` into contiguous tensors of consecutive rows, and returns the checksum
        of all of it.

        Raises CheckpointError as `slice_of` does.
        """
        file, said = self._holder(name), self._said(name)
        self.dtype_of(name)
        start, _ = self._header(file)
        self._check_shape(name, tuple(said["shape"]), shape)
        begin, end = said["data_offsets"]
        assert end - begin == sum(target.nbytes for target in targets), (name, said)
        found = xxhash.xxh3_64()
        with (self.folder / file).open("rb", buffering=0) as stream:
            stream.seek(start + begin)
            for target in targets:
                read_into(stream, target, f"{self.folder / file}: {name}")
                found.update(bytes_of(target))
        return str(found.hexdigest())

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns a tensor's dtype.

        Raises CheckpointError unless it is a floating-point dtype: others are quantised, or no
        weights.
        """
        said = self._said(name)["dtype"]
        if said not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{self.folder / self._holder(name)}: {name} is of dtype {said}; weights are {', '.join(WEIGHT_DTYPES)}. "
                "Quantised weights can't be trained: convert the folder to bfloat16 first."
            )
        return DTYPES[said]

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._said(name)["shape"])

    def _said(self, name: str) -> Any:
        """Returns a tensor's entry in the header of its file."""
        file = self._holder(name)
        _, header = self._header(file)
        if name not in header:
            raise CheckpointError(
                f"{self.folder / INDEX} names {file} for {name!r}, which is not in that file."
            )
        return header[name]

    def _holder(self, name: str) -> str:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.folder} holds no tensor {name!r}, which its config.json asks for."
            )
        return self._file_of[name]

    def _check_shape(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != tuple(wanted):
            raise CheckpointError(
                f"{self.folder / self._file_of[name]}: {name} has shape {found}; config.json asks for {tuple(wanted)}."
            )

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.folder / name} can't be read: {error}") from error
        return self._open[name]

    def _header(self, file: str) -> tuple[int, dict[str, Any]]:
        """Returns (start of the data, header) of a file, which `safe_open` has checked against its
        length.
        """
        if file not in self._headers:
            self._file(file)
            with (self.folder / file).open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                try:
                    self._headers[file] = 8 + length, parse_json(stream.read(length))
                except NotJSON as error:
                    raise CheckpointError(
                        f"{self.folder / file}: the header is {error}."
                    ) from error
        return self._headers[file]


def read_into(stream: Any, tensor: Tensor, what: str) -> None:
    """Fills a contiguous tensor from an unbuffered file.

    Raises CheckpointError if the file ends early.
    """
    view = memoryview(bytes_of(tensor))
    while len(view):
        if not (count := stream.readinto(view)):
            raise CheckpointError(f"{what}: the file ends {len(view)} bytes early.")
        view = view[count:]


def bytes_of(tensor: Tensor) -> Any:
    """Returns a contiguous tensor's memory as a numpy array of bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def is_finite(tensor: Tensor) -> bool:
    """Returns whether a tensor holds neither NaN nor infinity."""
    if tensor.dtype == torch.float8_e4m3fn:  # which torch can't compare
        tensor = tensor.float()
    return not tensor.numel() or all(bool(edge.isfinite()) for edge in tensor.aminmax())


def checksum(tensor: Tensor) -> str:
    """Returns the XXH3 (64 bits) of a tensor's bytes: as fast as memory, where a CRC takes longer
    than the disk.
    """
    return str(xxhash.xxh3_64_hexdigest(bytes_of(tensor.contiguous())))


def shards_of(planned: Sequence[PlannedTensor], shard_bytes: int) -> dict[str, list[PlannedTensor]]:
    """Returns file name -> tensors, in order, up to `shard_bytes` per file (a larger tensor gets a
    file of its own).
    """
    shards: list[list[PlannedTensor]] = []
    size = 0
    for tensor in planned:
        if not shards or size + tensor.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }


def draft_of(path: Path) -> Path:
    """Returns the temporary path of a file that is being written."""
    return path.with_name(path.name + ".part")


def land(path: Path) -> None:
    """Renames a written file to its final name, once it is on the disk."""
    with draft_of(path).open("rb") as stream:
        os.fsync(stream.fileno())
    draft_of(path).rename(path)


class WrittenFile(NamedTuple):
    """WrittenFile holds the checksums of a written file: XXH3 (64 bits) of each tensor by name, and
    XXH3 (128 bits) of all its bytes, in hex.
    """

    tensors: dict[str, str]
    file: str


def write_shard(
    path: Path, planned: Sequence[PlannedTensor], tensors: Iterator[tuple[str, Tensor]]
) -> WrittenFile:
    """Writes the next tensors of a stream, one in memory at a time, and returns their checksums.

    The file gets its name when it is complete and on the disk. Raises CheckpointError for a tensor
    that is not finite.
    """
    offset = 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor in planned:
        header[tensor.name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.bytes],
        }
        offset += tensor.bytes
    said = json.dumps(header, separators=(",", ":")).encode()
    said += b" " * (-len(said) % 8)
    sums = {}
    with draft_of(path).open("wb", buffering=0) as raw:
        stream = _Summed(raw)
        write_bytes(stream, len(said).to_bytes(8, "little") + said)
        for wanted in planned:
            name, given = next(tensors)
            assert (name, given.dtype, tuple(given.shape)) == tuple(wanted), (
                name,
                given.dtype,
                given.shape,
                wanted,
            )
            given = given.detach().to("cpu").contiguous()
            if not is_finite(given):
                raise CheckpointError(
                    f"{name} holds NaN or infinity, so it is not written to {path.parent}."
                )
            sums[name] = checksum(given)
            write_all(stream, given)
    land(path)
    return WrittenFile(sums, stream.sum.hexdigest())


class _Summed:
    """_Summed is a raw stream with a checksum of the bytes written to it, computed while they are
    in the processor's caches.
    """

    def __init__(self, stream: Any):
        self.stream, self.sum = stream, xxhash.xxh3_128()

    def write(self, view: memoryview) -> int:
        written: int = self.stream.write(view)
        self.sum.update(view[:written])
        return written


def write_all(stream: Any, tensor: Tensor) -> None:
    """Writes all bytes of a contiguous tensor."""
    write_bytes(stream, bytes_of(tensor))


def write_bytes(stream: Any, content: Any) -> None:
    """Writes all bytes: a raw stream may take fewer in one call, 2 GiB at most."""
    view = memoryview(content)
    while len(view):
        view = view[stream.write(view) :]


def write_index(folder: Path, shards: dict[str, list[PlannedTensor]]) -> None:
    """Writes the index of a complete folder."""
    weight_map = {tensor.name: file for file, planned in shards.items() for tensor in planned}
    total = sum(tensor.bytes for planned in shards.values() for tensor in planned)
    draft_of(folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    )
    land(folder / INDEX)


def copy_companions(source: Path, target: Path, *, quantised: bool = False) -> str | None:
    """Copies config, tokenizer and generation files: everything but weights and their descriptions.

    `quantised`: the weights are written quantised, as config.json describes. Returns the changes to
    config.json as text, or None: layers that are left out are not counted, and quantisation of
    weights that are written unquantised is removed.
    """
    said = None
    for path in source.iterdir():
        weights = (
            path.suffix in WEIGHTS or path.name.endswith(".index.json") or path.name in OF_WEIGHTS
        )
        own = path.name.startswith(".rftmega")  # a mark or a lock, of that folder
        if not path.is_file() or weights or own:
            continue
        draft = draft_of(target / path.name)
        draft.unlink(missing_ok=True)
        shutil.copyfile(path, draft)  # with this process's rights, not the source's
        if path.name == "config.json":
            said = _as_written(draft, quantised=quantised)
        land(target / path.name)
    return said


def _as_written(config: Path, *, quantised: bool) -> str | None:
    """Rewrites a copy of config.json if it counts layers that are left out, or describes quantised
    weights; returns the changes as text, or None.
    """
    content = read_json_object(config)
    changes = written(content)
    if quantised:
        changes.pop(FIELD)
    if not changes:
        return None
    gone = [name for name, value in changes.items() if value is None]
    kept = {name: value for name, value in (content | changes).items() if name not in gone}
    config.write_text(json.dumps(kept, indent=2) + "\n")
    said = [f"{name}={changes[name]}" for name in changes if name not in gone]
    found = []
    if said:
        found.append(
            f"config.json says {', '.join(said)}: the layers that it counted are not among the weights"
        )
    if gone:
        found.append(f"config.json has no {', '.join(gone)}: the weights are written unquantised")
    return "; ".join(found)
