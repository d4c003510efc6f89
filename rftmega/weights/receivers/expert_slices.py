"""Joins an expert's matrices to the slice of the stacked tensor that its folder has for all experts:
vLLM's loader of gpt-oss reads slices by expert, and no separate matrices.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rftmega.converters import stacks_of
from rftmega.converters.stacks import Place, Stack
from rftmega.core.json_files import read_json_object


def expert_slices(
    folder: str | Path, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields each expert's slice of a stacked tensor, transposed as in the folder, as soon as its
    last matrix or bias has arrived, and all other tensors unchanged. If vLLM reads the matrices of
    the model in `folder`, all tensors are unchanged.

    The slice's name has the expert's number: `...experts.3.gate_up_proj`.
    """
    stacks = stacks_of(read_json_object(Path(folder) / "config.json"))
    places = {
        name: place
        for stack in stacks
        if stack.always_transposed
        for name, place in stack.places(transposed=True)
    }
    held: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        if (place := places.get(name)) is None:
            yield name, tensor
            continue
        joined = _name(place)
        parts = held.setdefault(joined, {})
        parts[place.number] = tensor
        if len(parts) == len(place.stack.matrices[0]):
            yield (
                joined,
                _slice(place.stack, [part for _, part in sorted(held.pop(joined).items())]),
            )


def _name(place: Place) -> str:
    stem, _, last = place.stack.name.rpartition(".")
    return f"{stem}.{place.expert}.{last}"


def _slice(stack: Stack, parts: Sequence[Tensor]) -> Tensor:
    assert stack.alternating, stack.name
    joined = torch.stack(list(parts), 1).flatten(0, 1)
    return joined.T if joined.dim() > 1 else joined
