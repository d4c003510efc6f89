"""Reinforcement fine-tuning of language models on Megatron-Core, with vLLM as the rollout engine.

`rftmega.train` runs a training from Python. Importing this costs nothing.
"""

import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rftmega.launch.api import RunResult, train

__all__ = ["RunResult", "train"]

# transformers imports torchao where it is installed. Of its kernels nothing is used here, and each
# rank would say which ones can't be loaded, and that two enumerations were told twice.
os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    """Imports what is asked for: a part of the package must not import the whole."""
    if name not in __all__:
        raise AttributeError(f"module 'rftmega' has no attribute {name!r}")
    from rftmega.launch import api

    return getattr(api, name)
