"""Detects CUDA's optional packages on this machine, and the fused kernels of Megatron's that they
make possible.
"""

import functools
import importlib
import re
from dataclasses import dataclass
from typing import Any

import torch

from rftmega.config import ParallelConfig
from rftmega.model_providers.description import ModelDescription
from rftmega.runtime import device


@dataclass(frozen=True)
class Installed:
    """Installed tells what was found beside torch.

    On a CPU nothing counts, whatever is installed.
    """

    transformer_engine: tuple[int, ...] | None = None  # its version
    permutation: bool = False  # Transformer Engine's kernels that sort tokens by expert
    weight_gradients: bool = False  # apex's fused_weight_gradient_mlp_cuda
    triton: bool = False  # what torch.compile needs
    deep_ep: bool = False
    why_not: str = ""  # why Transformer Engine is not used; empty where it is, and on a CPU

    @property
    def told(self) -> str:
        """Returns Transformer Engine's part of a run's first lines; empty on a CPU."""
        if self.transformer_engine is not None:
            return f"Transformer Engine {'.'.join(map(str, self.transformer_engine))}"
        return f"without Transformer Engine: {self.why_not}" if self.why_not else ""


@functools.cache
def installed() -> Installed:
    """Detects what this machine has.

    A package counts only where it can be imported: a broken installation is none.
    """
    if device.current().type != "cuda":
        return Installed()
    _, why_not = _imported("transformer_engine.pytorch")
    return Installed(
        transformer_engine=None
        if why_not
        else version_of(str(_imported("transformer_engine")[0].__version__)),
        permutation=not why_not and _is_there("transformer_engine.pytorch.permutation"),
        weight_gradients=_is_there("fused_weight_gradient_mlp_cuda"),
        triton=_is_there("triton"),
        deep_ep=_is_there("deep_ep"),
        why_not=why_not,
    )


def uses_transformer_engine() -> bool:
    """Returns whether layers are built from Transformer Engine's modules."""
    return installed().transformer_engine is not None


def _imported(name: str) -> tuple[Any, str]:
    """Imports a module, or says why it can't be imported: a library of another build may raise
    anything.
    """
    try:
        return importlib.import_module(name), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _is_there(name: str) -> bool:
    return _imported(name)[0] is not None


def version_of(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: 2.9.0+abc -> (2, 9, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", text)[0]))


def fused_kernels(
    found: Installed, model: ModelDescription, parallel: ParallelConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the fields of Megatron's config that a machine with `found` sets.

    Without any, those of a CPU.
    """
    engine = found.transformer_engine or ()
    fields = {
        # One kernel turns queries and one keys; Megatron's other way asks the device for the rows'
        # lengths, twice each. The fused one forgets YaRN's factor on packed rows, that of latent
        # attention is experimental in Megatron-Core 0.16, and an image's positions are no count.
        "apply_rope_fusion": engine >= (1, 12)
        and not model.latent
        and not model.rope.yarn
        and not model.rope.sections,
        "bias_activation_fusion": found.triton,
        # Weights' gradients are added to the fp32 sums by the kernel that computes them.
        "gradient_accumulation_fusion": bool(engine) or found.weight_gradients,
        # Of the local norm and attention, which are not used.
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        # The default refuses variable lengths, of dense models as well.
        "moe_token_dispatcher_type": "alltoall",
    }
    if model.experts:
        fields |= {
            "moe_grouped_gemm": bool(engine),
            "moe_permute_fusion": bool(engine) and found.permutation,
        }
        # Its kernels carry bfloat16 alone.
        if found.deep_ep and parallel.expert > 1 and dtype == torch.bfloat16:
            fields |= {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}
    return fields
