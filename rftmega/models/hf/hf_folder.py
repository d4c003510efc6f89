"""Reads the safetensors files of Hugging Face model folders by slice or by tensor, and writes them
from a stream of tensors.
"""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
OF_DTYPE = ("dtype", "torch_dtype")  # fields of config.json, of transformers 5 and before
SECTIONS = ("text_config", "vision_config", "audio_config")
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")
TABLES = ("I64", "U64", "BOOL")  # no format stores quantised weights in these
CODES = {dtype: code for code, dtype in DTYPES.items()} | {torch.float8_e4m3fn: "F8_E4M3"}


class PlannedTensor(NamedTuple):
    """PlannedTensor is the name, dtype and shape of a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class HFFolder:
    """HFFolder reads the safetensors files of a model folder; each file is opened once, when it is
    first needed.
    """

    def __init__(self, folder: str | Path):
        """Opens the folder. Raises CheckpointError if it contains no weights."""
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
        """Returns tensor name -> file name of a folder without an index."""
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
        """Returns the total number of elements of all tensors in the folder."""
        return sum(math.prod(self.shape_of(name)) for name in self.names)

    def slice_of(self, name: str, shape: tuple[int, ...], *, integers: bool | None = False) -> Any:
        """Returns a lazy slice of tensor `name`: indexing the slice reads only the selected
        elements.

        `shape`: the shape that the tensor must have; `integers`: see `dtype_of`. Raises
        CheckpointError if the tensor is missing or has another shape.
        """
        file = self._holder(name)
        self.dtype_of(name, integers=integers)
        found = self._file(file).get_slice(name)
        self._check_shape(name, tuple(found.get_shape()), shape)
        return found

    def whole(self, name: str, shape: tuple[int, ...], *, integers: bool | None = False) -> Tensor:
        """Returns tensor `name`, which must have shape `shape`, read into newly allocated memory: a
        mapped file would stay resident.

        Raises CheckpointError as `slice_of` does.
        """
        tensor = torch.empty(shape, dtype=self.dtype_of(name, integers=integers))
        self.fill([tensor], name, shape)
        return tensor

    def fill(self, targets: Sequence[Tensor], name: str, shape: tuple[int, ...]) -> str:
        """Reads tensor `name`, which must have shape `shape`, into `targets`, contiguous tensors of
        its consecutive rows, and returns the checksum of the whole tensor.

        Raises CheckpointError as `slice_of` does.
        """
        file, said = self._holder(name), self._said(name)
        self.dtype_of(name, integers=not targets[0].dtype.is_floating_point)
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

    def entry(self, name: str, shape: tuple[int, ...], number: int) -> Tensor:
        """Returns entry `number` along the first dimension of tensor `name`, which must have shape
        `shape`; read into newly allocated memory.

        Raises CheckpointError as `slice_of` does.
        """
        file, said = self._holder(name), self._said(name)
        start, _ = self._header(file)
        self._check_shape(name, tuple(said["shape"]), shape)
        found = torch.empty(shape[1:], dtype=self.dtype_of(name))
        with (self.folder / file).open("rb", buffering=0) as stream:
            stream.seek(start + said["data_offsets"][0] + number * found.nbytes)
            read_into(stream, found, f"{self.folder / file}: {name}")
        return found

    def dtype_of(self, name: str, *, integers: bool | None = False) -> torch.dtype:
        """Returns the dtype of tensor `name`.

        `integers`: whether the tensor must be a table of whole numbers, such as one from token ids
        to experts (True), a weight (False), or may be either (None). Raises CheckpointError for any
        other dtype. Weights have a dtype of WEIGHT_DTYPES, unless they are quantised.
        """
        said = self._said(name)["dtype"]
        accepted = (*INTEGERS, *WEIGHT_DTYPES) if integers is None else WEIGHT_DTYPES
        if said in (INTEGERS if integers else accepted):
            return DTYPES[said]
        where = f"{self.folder / self._holder(name)}: {name} is of dtype {said}"
        if integers:
            raise CheckpointError(
                f"{where}; the model has a table of whole numbers there. Take the folder that belongs to this config.json."
            )
        remedy = "Quantised weights can't be trained: convert the folder to bfloat16 first."
        if said in TABLES:
            remedy = "It may be a table of tokens or experts, which is neither trained nor pushed. Take another model."
        raise CheckpointError(f"{where}; weights are {', '.join(WEIGHT_DTYPES)}. {remedy}")

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._said(name)["shape"])

    def _said(self, name: str) -> Any:
        """Returns the entry of tensor `name` in the header of its file: dtype, shape and offsets."""
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
        """Returns (offset of the data in bytes, header) of a safetensors file, whose length
        `safe_open` has checked.
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


def fill_from(weight: Any, targets: Sequence[Tensor]) -> str:
    """Copies `weight`, of which slices can be taken, into `targets`, contiguous tensors of its
    consecutive rows, and returns the checksum of the whole.
    """
    found, start = xxhash.xxh3_64(), 0
    for target in targets:
        target.copy_(weight[start : start + len(target)])
        found.update(bytes_of(target))
        start += len(target)
    return str(found.hexdigest())


def read_into(stream: Any, tensor: Tensor, what: str) -> None:
    """Fills a contiguous tensor from an unbuffered file.

    `what` names the file and tensor in messages. Raises CheckpointError if the file ends early.
    """
    view = memoryview(bytes_of(tensor))
    while len(view):
        if not (count := stream.readinto(view)):
            raise CheckpointError(f"{what}: the file ends {len(view)} bytes early.")
        view = view[count:]


def bytes_of(tensor: Tensor) -> Any:
    """Returns a contiguous host tensor's memory as a numpy array of bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def is_finite(tensor: Tensor) -> bool:
    """Returns whether a tensor contains neither NaN nor infinity."""
    if tensor.dtype == torch.float8_e4m3fn:  # which torch can't compare
        tensor = tensor.float()
    return not tensor.numel() or all(bool(edge.isfinite()) for edge in tensor.aminmax())


def checksum(tensor: Tensor) -> str:
    """Returns the 64-bit XXH3 hash of a tensor's bytes in hexadecimal; it is computed as fast as
    memory is read, whereas a CRC would be slower than the disk.
    """
    return str(xxhash.xxh3_64_hexdigest(bytes_of(tensor.contiguous())))


def shards_of(planned: Sequence[PlannedTensor], shard_bytes: int) -> dict[str, list[PlannedTensor]]:
    """Splits tensors into files: returns file name -> tensors, in order, with up to `shard_bytes`
    per file.
    A larger tensor gets a separate file.
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
    """Returns the temporary path of a file while it is written."""
    return path.with_name(path.name + ".part")


def land(path: Path) -> None:
    """Flushes the draft of `path` (see `draft_of`) to disk and renames it to `path`."""
    with draft_of(path).open("rb") as stream:
        os.fsync(stream.fileno())
    draft_of(path).rename(path)


class WrittenFile(NamedTuple):
    """WrittenFile holds the checksums of a written file in hexadecimal: the 64-bit XXH3 of each
    tensor by name, and the 128-bit XXH3 of the whole file.
    """

    tensors: dict[str, str]
    file: str


def write_shard(
    path: Path, planned: Sequence[PlannedTensor], tensors: Iterator[tuple[str, Tensor]]
) -> WrittenFile:
    """Writes the `planned` tensors, taken from the stream `tensors` in the same order, to a
    safetensors file and returns their checksums.
    One tensor at a time is in memory. The file gets its final name when it is complete and on the
    disk. Raises CheckpointError if a tensor contains NaN or infinity.
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
    """_Summed is a raw stream that computes a checksum of the bytes written to it, while they are
    in the processor's caches.
    """

    def __init__(self, stream: Any):
        self.stream, self.sum = stream, xxhash.xxh3_128()

    def write(self, view: memoryview) -> int:
        written: int = self.stream.write(view)
        self.sum.update(view[:written])
        return written


def write_all(stream: Any, tensor: Tensor) -> None:
    """Writes all bytes of a contiguous tensor to a stream."""
    write_bytes(stream, bytes_of(tensor))


def write_bytes(stream: Any, content: Any) -> None:
    """Writes all bytes of `content`, in several calls if needed: a raw stream accepts at most 2 GiB
    per call.
    """
    view = memoryview(content)
    while len(view):
        view = view[stream.write(view) :]


def write_index(folder: Path, shards: dict[str, list[PlannedTensor]]) -> None:
    """Writes the index file (tensor name -> file name) of a folder whose shards are complete."""
    weight_map = {tensor.name: file for file, planned in shards.items() for tensor in planned}
    total = sum(tensor.bytes for planned in shards.values() for tensor in planned)
    draft_of(folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    )
    land(folder / INDEX)


def copy_companions(
    source: Path,
    target: Path,
    shards: Mapping[str, Sequence[PlannedTensor]],
    *,
    quantised: bool = False,
) -> str | None:
    """Copies a model's config, tokenizer and generation files from folder `source` to `target`: all
    files but weights and files that describe weights.

    `shards`: the written tensors by file; empty if they aren't a Hugging Face folder's. `quantised`:
    the weights are written quantised, as config.json says. config.json is changed to fit the
    written tensors: their dtype, the number of layers that are written, and no quantisation that
    they don't have. Returns these changes as text, or None if there are none.
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
            said = _as_written(draft, None if quantised else _dtype_of(shards), quantised=quantised)
        land(target / path.name)
    return said


def _dtype_of(shards: Mapping[str, Sequence[PlannedTensor]]) -> str | None:
    """Returns the name of the dtype in which most bytes of the tensors are, apart from tables of
    whole numbers; None if weights can't have this dtype.
    """
    sizes = Counter[torch.dtype]()
    for tensors in shards.values():
        for tensor in tensors:
            if CODES[tensor.dtype] not in TABLES:
                sizes[tensor.dtype] += tensor.bytes
    if not sizes:
        return None
    (dtype, _), *_ = sizes.most_common(1)
    name = str(dtype).removeprefix("torch.")
    return name if CODES[dtype] in WEIGHT_DTYPES else None


def _as_written(config: Path, dtype: str | None, *, quantised: bool) -> str | None:
    """Rewrites a copy of config.json if it states another dtype than `dtype` (None: none is to be
    stated), counts layers that are not written, or describes a quantisation that the written
    weights don't have; returns the changes as text, or None.
    """
    given = read_json_object(config)
    content = given if dtype is None else _stating(given, dtype)
    changes = written(content)
    if quantised:
        changes.pop(FIELD)
    if not changes and content == given:
        return None
    gone = [name for name, value in changes.items() if value is None]
    kept = {name: value for name, value in (content | changes).items() if name not in gone}
    config.write_text(json.dumps(kept, indent=2) + "\n")
    inner = changes.pop("text_config", {})
    before = content.get("text_config") or {}
    said = [f"{name}={changes[name]}" for name in changes if name not in gone]
    said += [f"text_config.{name}={x}" for name, x in inner.items() if x != before[name]]
    found = []
    if said:
        found.append(
            f"config.json says {', '.join(said)}: the layers that it counted are not among the weights"
        )
    if gone:
        found.append(f"config.json has no {', '.join(gone)}: the weights are written unquantised")
    if content != given:
        found.append(f"config.json says {dtype}, the dtype of the written weights")
    return "; ".join(found)


def _stating(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Returns a config.json that states a dtype, also in its sections that stated one."""
    found = {name: _stated(name, value, dtype) for name, value in config.items()}
    return found if any(name in found for name in OF_DTYPE) else {**found, "dtype": dtype}


def _stated(name: str, value: Any, dtype: str) -> Any:
    if name in OF_DTYPE:
        return dtype
    if name in SECTIONS and isinstance(value, dict):
        return {
            inner: dtype if inner in OF_DTYPE and one is not None else one
            for inner, one in value.items()
        }
    return value
