"""Reinforcement fine-tuning of language models on Megatron-Core, with vLLM as the rollout engine.

`rftmega.train` runs a training from Python. Importing the package is cheap: its functions are
imported on first use.
"""

import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rftmega.run.api import RunResult, train

__all__ = ["RunResult", "__version__", "train"]

__version__ = "0.1.0"

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch gives advice on NUMA
# transformers imports torchao where it is installed. Of its kernels nothing is used here, and each
# rank would say which ones can't be loaded, and that two enumerations were told twice.
os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)


class _BeforeMegatron:
    """_BeforeMegatron is an import hook that prepares torch at the first import of megatron.core,
    by any module: on a CPU, Megatron needs a view of torch
    (`rftmega.runtime.device.before_megatron`).
    """

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name != "megatron.core":
            return None
        sys.meta_path.remove(cls)
        import rftmega.runtime.device.before_megatron  # noqa: F401

        return importlib.util.find_spec(name)


if "megatron.core" not in sys.modules:
    sys.meta_path.insert(0, _BeforeMegatron)


def __getattr__(name: str) -> Any:
    """Imports a function or class of the public API (rftmega.run.api) on its first use, so that
    importing a part of the package does not import the whole.
    """
    if name not in __all__:
        raise AttributeError(f"module 'rftmega' has no attribute {name!r}")
    from rftmega.run import api

    return getattr(api, name)
