"""Trains transformers modules exactly as they score: without dropout, layer drop or router noise,
whatever config.json sets.
All of these depend on a module's training flag, so the flag stays False. Gradient checkpointing
depends on the flags of layers only: a layer's flag is True when the layer is called, and False
while it computes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def allow_recomputation(model: Any) -> None:
    """Prepares the layers of a transformers model for gradient checkpointing, which `learn` enables
    and disables.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            own: dict[str, Any] = vars(layer)
            plain = own["_gradient_checkpointing_func"]
            own["_gradient_checkpointing_func"] = partial(_recomputed, layer, plain)


def learn(model: nn.Module, learning: bool) -> None:
    """Switches a transformers model to training (`learning`) or to scoring; both compute the same,
    without dropout, but only training uses gradient checkpointing.
    """
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
