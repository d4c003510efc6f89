"""Reads the rows of a teacher's LM head that belong to its student's shard of the vocabulary."""

from typing import NamedTuple

import torch
from torch import Tensor

from rftmega.models.hf.hf_folder import HFFolder
from rftmega.models.kernels.chunked_head import Head


class HeldRows(NamedTuple):
    """HeldRows is the range of LM-head rows, padding included, that a process holds."""

    first: int
    width: int


class HeadSource(NamedTuple):
    """HeadSource describes a model's LM head and its tensors in a Hugging Face folder."""

    files: HFFolder
    weight: str  # name of the tensor
    shape: tuple[int, int]  # vocabulary, hidden size
    bias: str | None = None
    cap: float | None = None
    factor: float = 1.0  # of the logits

    def rows(self, held: HeldRows, dtype: torch.dtype) -> Head:
        """Reads the rows `held` into a Head on the host; rows behind the vocabulary are 0.

        Raises CheckpointError if a tensor is missing or has another shape.
        """
        weight = self._read(self.weight, self.shape, held, dtype)
        bias = None
        if self.bias is not None:
            bias = self._read(self.bias, self.shape[:1], held, dtype)
        return Head(weight, bias, cap=self.cap, factor=self.factor)

    def _read(
        self, name: str, shape: tuple[int, ...], held: HeldRows, dtype: torch.dtype
    ) -> Tensor:
        found = torch.zeros(held.width, *shape[1:], dtype=dtype)
        stop = min(held.first + held.width, shape[0])
        if stop > held.first:
            found[: stop - held.first] = self.files.slice_of(name, shape)[held.first : stop]
        return found
