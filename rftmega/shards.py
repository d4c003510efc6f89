"""Shards describe what a process holds of a model in Hugging Face's terms, whatever backend built it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ShardBox:
    """ShardBox is a box of one of the tensors that training goes on from, as this process holds it.

    Keys and shapes are the same under every layout, so a checkpoint of one is read under another.
    """

    key: str  # "weights/...", "average/...", "main/...", "exp_avg/...": kind, and name in the model
    shape: tuple[int, ...]  # of the whole tensor
    padded: bool  # the number of its rows depends on the layout; the rows behind are zeros
    offset: tuple[int, ...]  # of the box in it
    tensor: Tensor  # the box, a view
    written: bool  # by this process, not by another that holds the same
