"""Reads the weights of folders that hold PyTorch's own files, `pytorch_model*.bin`, instead of
safetensors. Only tensors are unpickled; code in a file is not run.
"""

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import read_weight_map

INDEX = "pytorch_model.bin.index.json"


class PickledFolder:
    """PickledFolder reads the tensors of a folder's *.bin files, one file after the other; memory
    is mapped, so that a tensor is read when it is needed.
    """

    def __init__(self, folder: str | Path):
        """Opens the folder. Raises CheckpointError if it has no *.bin files, or a
        file that is not a dictionary of tensors.
        """
        self.folder = Path(folder)
        index = self.folder / INDEX
        if index.is_file():
            self.files: list[Path] = [
                self.folder / name
                for name in sorted(set(read_weight_map(index, ending=".bin").values()))
            ]
        else:
            self.files = sorted(self.folder.glob("pytorch_model*.bin"))
        if not self.files:
            raise CheckpointError(f"{self.folder} holds no pytorch_model*.bin.")
        self._tensors: dict[str, Tensor] = {}
        for file in self.files:
            self._tensors |= tensors_in(file)

    @property
    def names(self) -> Iterable[str]:
        return self._tensors

    def dtype_of(self, name: str, *, integers: bool | None = False) -> torch.dtype:
        return self._tensors[name].dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def whole(self, name: str, shape: tuple[int, ...], *, integers: bool | None = False) -> Tensor:
        return self._tensors[name].contiguous()


def tensors_in(file: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by name. Raises CheckpointError if it holds anything else."""
    try:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        first = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{file} can't be read: {first}") from error
    if not isinstance(found, Mapping) or not all(isinstance(x, Tensor) for x in found.values()):
        raise CheckpointError(
            f"{file} is no dictionary of tensors, so it holds no model's weights."
        )
    return dict(found)
