"""Hugging Face weights into this process's shards; reads only the slices that it holds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from converters import shard
from rftmega.errors import CheckpointError
from rftmega.megatron.binding import Bound


class HFFolder:
    """The safetensors files of a model folder, opened lazily and once each."""

    def __init__(self, folder: str | Path):
        """Raises CheckpointError where the folder holds no weights."""
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            files = sorted(path.name for path in self.folder.glob("*.safetensors"))
            if not files:
                raise CheckpointError(f"{folder} holds no *.safetensors weights.")
            self._file_of = {name: file for file in files for name in self._file(file).keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def slice_of(self, name: str, shape: tuple[int, ...]) -> Any:
        """A lazy slice of tensor `name`. Raises CheckpointError where it is missing or of another shape."""
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}, which its config.json asks for.")
        file = self._file_of[name]
        found = self._file(file).get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise CheckpointError(
                f"{self.folder / file}: {name} has shape {tuple(found.get_shape())}; config.json asks for {shape}."
            )
        return found

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (SafetensorError, FileNotFoundError) as error:
                raise CheckpointError(f"{self.folder / name} can't be read: {error}") from error
        return self._open[name]


@torch.no_grad()
def load_hf(files: HFFolder, bound: Sequence[Bound]) -> None:
    """Fills every bound parameter from `files`, reading only this process's slices.

    Raises CheckpointError for a missing tensor, a wrong shape or an unreadable file.
    """
    for item in bound:
        if item.rule.optional and not any(name in files for name in item.hf_names):
            continue
        slices = [files.slice_of(name, tensor.shape) for name, tensor in zip(item.hf_names, item.rule.hf, strict=True)]
        item.parameter.copy_(shard(item.rule, slices, item.rank, item.ranks))
