"""Routes say which experts each token was sent to: [tokens, layers with experts, experts a token].

They have a place for each token of a row but the last, which no model is fed. A place that nobody told of
is full of `unknown`: whoever computes that token chooses for itself.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rftmega.core.errors import EngineError


class RoutedModel(NamedTuple):
    """RoutedModel says what the routes of a mixture look like."""

    layers: tuple[int, ...]  # those with experts, of all layers of the model
    experts: int  # in each
    active: int  # experts that a token goes to


class ChosenExperts(NamedTuple):
    """ChosenExperts says where one layer sent some of a micro-batch's tokens."""

    slots: Tensor  # [n] int64 of the flat [rows x columns] grid of fed tokens, on the host
    layer: int  # its place among the layers with experts
    experts: Tensor  # [n, experts a token]


def kind_of(experts: int) -> torch.dtype:
    """Returns the smallest integers that number so many experts and `unknown`."""
    return torch.uint8 if experts <= torch.iinfo(torch.uint8).max else torch.int16


def unknown(kind: torch.dtype) -> int:
    """Returns what stands for an expert that nobody told of."""
    return torch.iinfo(kind).max


def joined(before: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Returns the routes of a longer context, `more`, but for those tokens that have been fed before:
    what follows read the keys and values that they gave then.
    """
    if before is None or more is None:
        return before if more is None else more
    return torch.cat([before, more[len(before) :]])


def to_length(routes: Tensor, length: int) -> Tensor:
    """Returns routes of so many tokens, unknown where there are fewer."""
    missing = length - len(routes)
    if missing <= 0:
        return routes[:length]
    rest = routes.new_full((missing, *routes.shape[1:]), unknown(routes.dtype))
    return torch.cat([routes, rest])


def of_vllm(told: Any, model: RoutedModel, fed: int) -> Tensor:
    """Reads what vLLM tells of a request: an array [tokens fed, layers of the model, experts a token],
    in which the places of dense layers are unused.

    Raises EngineError for anything else.
    """
    shape = tuple(getattr(told, "shape", ()))
    last = max(model.layers)
    if len(shape) != 3 or shape[0] != fed or shape[1] <= last or shape[2] != model.active:
        raise EngineError(
            f"The engine told routes of shape {shape or told!r}. Of {fed} tokens that were fed they would be "
            f"[{fed}, more than {last} layers, {model.active} experts a token]."
        )
    numbers = torch.as_tensor(told.astype("int64"))[:, list(model.layers)]
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < model.experts:
        raise EngineError(
            f"The engine told of experts {int(numbers.min())} to {int(numbers.max())}; there are {model.experts}."
        )
    return numbers.to(kind_of(model.experts))
