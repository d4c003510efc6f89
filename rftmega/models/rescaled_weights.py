"""Turns off a model's rescaling of its own weights."""

from typing import Any

RESCALING = "rescale_every"  # RWKV: layers whose outputs are halved in 16-bit inference


def without_rescaling(config: Any) -> Any:
    """Changes transformers' config of a model so that its forward pass leaves the weights as they
    are, and returns it.

    In inference, RWKV divides output weights in place by 2 every few layers and halves the hidden
    states alike, against overflows in float16. The function stays the same, but the weights that
    would be pushed and exported would be others.
    """
    if getattr(config, RESCALING, 0):
        setattr(config, RESCALING, 0)
    return config
