"""Expert routes of MoE models, for router replay: the experts that each token was sent to, as
tensors [tokens, MoE layers, experts per token].

Routes cover every token of a row except the last, which is never a model input. Entries without a
recorded route hold the value `unknown`: the model that computes these tokens chooses their experts
itself.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rftmega.core.errors import EngineError


class RoutedModel(NamedTuple):
    """Shape of an MoE model's expert routes."""

    layers: tuple[int, ...]  # indices of the MoE layers among all layers of the model
    experts: int  # per layer
    active: int  # experts per token


class ChosenExperts(NamedTuple):
    """Experts that one layer chose for some tokens of a micro-batch."""

    slots: Tensor  # [n] int64 into the flat [rows x columns] grid of input tokens, on the host
    layer: int  # its index among the MoE layers
    experts: Tensor  # [n, experts per token]


def kind_of(experts: int) -> torch.dtype:
    """Returns the smallest integer dtype that can number `experts` experts and `unknown`."""
    return torch.uint8 if experts <= torch.iinfo(torch.uint8).max else torch.int16


def unknown(kind: torch.dtype) -> int:
    """Returns the value of dtype `kind` that marks an expert without a recorded route: its maximum."""
    return torch.iinfo(kind).max


def joined(before: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Returns the routes `more` of a longer context, in which the routes of the first tokens are
    replaced by those recorded `before`, since later tokens attended to keys and values computed
    with the earlier routes. If one argument is None, returns the other.
    """
    if before is None or more is None:
        return before if more is None else more
    return torch.cat([before, more[len(before) :]])


def to_length(routes: Tensor, length: int) -> Tensor:
    """Cuts or extends routes to `length` tokens; the routes of added tokens are `unknown`."""
    missing = length - len(routes)
    if missing <= 0:
        return routes[:length]
    rest = routes.new_full((missing, *routes.shape[1:]), unknown(routes.dtype))
    return torch.cat([routes, rest])


def of_vllm(told: Any, model: RoutedModel, fed: int) -> Tensor:
    """Converts the routes that vLLM reports for a request, `told`, to a tensor [input tokens, MoE
    layers, experts per token].

    `told` is an array [input tokens, layers of the model, experts per token], in which the entries
    of dense layers are unused; `fed`: the expected number of input tokens. Raises EngineError for
    any other shape or expert number.
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
