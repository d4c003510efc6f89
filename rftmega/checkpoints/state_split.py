"""Splits a training state into JSON for the checkpoint's manifest and tensors for its files, and
merges both again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

KEY = "state/"
# a dict with only this key stands for a tensor: (key, offset in the tensor of that key, shape)
TENSOR = "tensor"
Tensors = dict[str, list[Tensor]]


def taken_apart(state: Any) -> tuple[Any, Tensors]:
    """Splits a training state (nested dicts and lists of values and tensors) into JSON and its
    tensors. Returns both; the JSON refers to the tensors, which are listed by key. All tensors of
    one dtype share a key, since there may be very many tensors.
    """
    tensors: Tensors = {}
    ends: dict[str, int] = {}

    def taken(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = KEY + str(value.dtype).removeprefix("torch.")
            tensors.setdefault(key, []).append(value)
            begin = ends.setdefault(key, 0)
            ends[key] += value.numel()
            return {TENSOR: [key, begin, list(value.shape)]}
        if isinstance(value, dict):
            return {name: taken(each) for name, each in value.items()}
        return [taken(each) for each in value] if isinstance(value, list | tuple) else value

    return taken(state), tensors


def joined(tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Concatenates the tensors of each key on the host. Returns key -> flat tensor [n]."""
    return {
        key: torch.cat([each.detach().cpu().flatten() for each in parts])
        for key, parts in tensors.items()
    }


def put_together(said: Any, read: Callable[[str], Tensor]) -> Any:
    """Returns the state that `taken_apart` split into `said` (the JSON) and tensors. `read`:
    returns the concatenated tensor of a key, as `joined` made it.
    """
    read = cache(read)

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() != {TENSOR}:
                return {name: put(each) for name, each in value.items()}
            key, begin, shape = value[TENSOR]
            # a view would keep all of the joined tensor
            return read(key)[begin : begin + math.prod(shape)].view(shape).clone()
        return [put(each) for each in value] if isinstance(value, list) else value

    return put(said)
