"""Reinforcement fine-tuning of language models on Megatron-Core, with vLLM as the rollout engine.

`rftmega.train` runs a training from Python. Importing this costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rftmega.launch.api import RunResult, train

__all__ = ["RunResult", "train"]


def __getattr__(name: str) -> Any:
    """Imports what is asked for: a part of the package must not import the whole."""
    if name not in __all__:
        raise AttributeError(f"module 'rftmega' has no attribute {name!r}")
    from rftmega.launch import api

    return getattr(api, name)
