"""Lets modules of transformers learn as they score: without dropout, layers left out, or noise in
routers, whatever config.json says.

All of these ask a module whether it is in training mode, so none ever is. Recomputation asks the
same, of layers alone: they say so while they are called, and not while they compute.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def allow_recomputation(model: Any) -> None:
    """Makes the layers of a model compute again in a backward pass, once `learn` says so."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            own: dict[str, Any] = vars(layer)
            plain = own["_gradient_checkpointing_func"]
            own["_gradient_checkpointing_func"] = partial(_recomputed, layer, plain)


def learn(model: nn.Module, learning: bool) -> None:
    """Switches a model between learning and scoring, which differ in recomputation alone."""
    model.eval()
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            layer.training = learning


def _recomputed(
    layer: nn.Module, checkpoint: Callable[..., Any], call: Callable[..., Any], *given: Any
) -> Any:
    def as_scored(*given: Any) -> Any:
        learning = layer.training
        layer.training = False
        try:
            return call(*given)
        finally:
            layer.training = learning

    return checkpoint(as_scored, *given)
