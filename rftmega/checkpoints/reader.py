"""Reads distributed checkpoints: finds the stored blocks of each tensor and verifies the checksum
of each block that it reads.
"""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import read_json_object
from rftmega.models.hf.hf_folder import checksum, read_into

MARK = "metadata.json"  # Megatron's marker file of a checkpoint
MANIFEST = "manifest.json"  # ours: written last
PROGRESS = "progress.jsonl"  # of an unfinished conversion; removed at its end
# since 3 a state's tensors are in the files; since 4 it has expected lengths and numbers of tasks;
# since 5 completions in it have no padding; since 6 a run's tensors have Hugging Face names
FORMAT = 6
READ = (2, 3, 4, 5, FORMAT)
# a norm's name as a separate module, and as Transformer Engine fuses it into the next module
NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


@dataclass(frozen=True)
class Stored:
    """Stored is the location and checksum of one block (box) of a tensor in a checkpoint file."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    file: str
    begin: int  # bytes
    length: int
    checksum: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> "Stored":
        return cls(**{**said, "offset": tuple(said["offset"]), "shape": tuple(said["shape"])})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the content of the manifest of the checkpoint in `folder` as a dictionary. Raises
    CheckpointError if the manifest is missing (the checkpoint is incomplete), damaged or of an
    unknown format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it is no checkpoint of ours, or its conversion did not end. Run it again."
        )
    manifest = read_json_object(path)
    if (said := manifest.get("format")) not in READ:
        newer = " Take a newer rftmega." if isinstance(said, int) and said > FORMAT else ""
        raise CheckpointError(
            f"{path} is of format {said}; this version reads {', '.join(map(str, READ[:-1]))} and {FORMAT}.{newer}"
        )
    if manifest.pop("seal", None) != seal(manifest):
        raise CheckpointError(f"{path} is not as it was written: its checksum is another.")
    return manifest


def read_checked(path: Path, sha256: str) -> bytes:
    """Returns the bytes of the file `path`.

    Raises CheckpointError if the file can't be read or its SHA-256 differs from `sha256`.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CheckpointError(f"{path} is not as it was written: its checksum is another.")
    return content


def seal(manifest: dict[str, Any]) -> str:
    """Returns the SHA-256 of the manifest's content, independent of its formatting in the file."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def is_distributed(folder: str | Path) -> bool:
    """Returns whether a folder contains a distributed checkpoint, or an unfinished conversion to
    one.
    """
    return any((Path(folder) / name).exists() for name in (MARK, PROGRESS)) and not any(
        Path(folder).glob("*.safetensors")
    )


class Reader:
    """Reader reads blocks (boxes) of tensors from a complete checkpoint, and verifies the checksum
    of each stored block that it reads.
    """

    def __init__(self, folder: Path):
        """Opens the checkpoint in `folder`. Raises CheckpointError if the checkpoint is incomplete
        or its metadata is damaged.
        """
        self.folder = folder
        self.manifest = read_manifest(folder)
        # the first checkpoints of this format have no checksums of these files
        for name, sha256 in self.manifest.get("files", {}).items():
            read_checked(folder / name, sha256)
        self.stored: dict[str, list[Stored]] = {}
        for said in self.manifest["pieces"]:
            box = Stored.from_json(said)
            self.stored.setdefault(box.key, []).append(box)

    def __contains__(self, key: str) -> bool:
        """Returns whether the checkpoint contains the tensor `key`, or the same norm weight under
        the name that Megatron's other norm layout (separate or fused) uses.
        """
        return self._named(key) in self.stored

    def _named(self, key: str) -> str:
        if key not in self.stored:
            for pair in NORMS.items():
                for one, other in (pair, pair[::-1]):
                    if (
                        key.endswith(f".{one}")
                        and (found := key.removesuffix(one) + other) in self.stored
                    ):
                        return found
        return key

    def dtype_of(self, key: str) -> torch.dtype:
        """Returns the dtype of tensor `key`. Raises CheckpointError if the checkpoint has no such
        tensor.
        """
        if key not in self:
            raise CheckpointError(f"{self.folder} holds no tensor {key!r}.")
        return getattr(torch, self.stored[self._named(key)][0].dtype)

    def fill(self, target: Tensor, key: str, offset: tuple[int, ...]) -> None:
        """Copies the block of tensor `key` that begins at `offset` and has the shape of `target`
        into `target`.

        Raises CheckpointError if the checkpoint does not contain all of the block, or a checksum
        differs.
        """
        self.dtype_of(key)
        missing = target.numel()
        for box in self.stored[self._named(key)]:
            low = [max(a, b) for a, b in zip(offset, box.offset, strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(offset, target.shape, box.offset, box.shape, strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            part = target[
                tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
            ]
            if (
                part.shape == box.shape
                and part.is_contiguous()
                and part.dtype == getattr(torch, box.dtype)
            ):
                self._read(box, part)
            else:
                held = self._read(box, torch.empty(box.shape, dtype=getattr(torch, box.dtype)))
                part.copy_(
                    held[
                        tuple(
                            slice(a - o, b - o)
                            for a, b, o in zip(low, high, box.offset, strict=True)
                        )
                    ]
                )
            missing -= part.numel()
        if missing:
            raise CheckpointError(f"{self.folder}: {missing} elements of {key!r} are missing.")

    def fill_shard(
        self,
        target: Tensor,
        key: str,
        shape: Sequence[int],
        offset: tuple[int, ...],
        *,
        padded: bool,
    ) -> None:
        """Copies the block of tensor `key` that begins at `offset` into the model's shard `target`,
        as `fill` does, after checking that the whole tensor has the same shape in the checkpoint as
        in the model (`shape`).

        If `padded` (the vocabulary is padded to divide evenly among ranks), the shapes may differ,
        and rows that are not stored become zeros.
        """
        self.dtype_of(key)
        held = self.manifest["shapes"][self._named(key)]
        if not padded and list(shape) != held:
            raise CheckpointError(
                f"{self.folder}: {key} has shape {tuple(held)}; the model's is {tuple(shape)}."
            )
        if padded:
            target.zero_()
        for axis, (start, size, whole) in enumerate(zip(offset, target.shape, held, strict=True)):
            target = target.narrow(axis, 0, max(0, min(size, whole - start)))
        if target.numel():
            self.fill(target, key, offset)

    def _read(self, box: Stored, tensor: Tensor) -> Tensor:
        """Reads the stored block `box` into `tensor` and returns `tensor`, which must be contiguous
        and have the block's shape and dtype. Reads the data in torch.save's archive directly.
        Raises CheckpointError if the block can't be read or its checksum differs.
        """
        path = self.folder / box.file
        try:
            with path.open("rb", buffering=0) as stream:
                archive: Any = torch._C.PyTorchFileReader(_Part(stream, box.begin, box.length))  # type: ignore[call-overload]
                stream.seek(box.begin + archive.get_record_offset("data/0"))
                read_into(stream, tensor, f"{path}: {box.key} at {box.offset}")
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: {box.key} at {box.offset} can't be read: {error}"
            ) from error
        if (found := checksum(tensor)) != box.checksum:
            raise CheckpointError(
                f"{path}: {box.key} at {box.offset} has checksum {found}, the manifest says {box.checksum}."
            )
        return tensor


class _Part(io.RawIOBase):
    """A byte range of the open file `stream`, presented as a separate file."""

    def __init__(self, stream: Any, begin: int, length: int):
        self.stream, self.begin, self.length, self.at = stream, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = (0, self.at, self.length)[whence] + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        self.stream.seek(self.begin + self.at)
        view = memoryview(buffer).cast("B")[: max(0, self.length - self.at)]
        count: int = self.stream.readinto(view)
        self.at += count
        return count
