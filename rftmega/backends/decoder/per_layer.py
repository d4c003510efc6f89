"""Reads fields of transformers' configs that may differ between layers."""

from typing import Any


def numbers_in(config: Any, name: str) -> set[int]:
    """Returns the numbers that a field of a config has in its layers, without 0; several only if it
    differs between layers.
    """
    try:
        found = [getattr(config, name, None)]
    except Exception:  # transformers refuses to give one value for several
        of_layers = getattr(config, "per_layer_config", None) or {}
        values = of_layers.values() if isinstance(of_layers, dict) else of_layers
        found = [getattr(each, name, None) for each in values]
    return {each for each in found if each}
