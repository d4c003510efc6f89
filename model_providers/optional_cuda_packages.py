"""Detects the installed optional CUDA packages, and selects the fused kernels of Megatron that they
enable.
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
    """Installed records which optional CUDA packages (Transformer Engine, apex, DeepEP and others)
    can be imported; on a CPU all are treated as missing.
    """

    transformer_engine: tuple[int, ...] | None = None  # its version
    permutation: bool = False  # Transformer Engine's kernels that permute tokens by expert
    weight_gradients: bool = False  # apex's fused_weight_gradient_mlp_cuda
    triton: bool = False  # for torch.compile
    deep_ep: bool = False
    why_not: str = ""  # why Transformer Engine is not used; empty if it is, and on a CPU

    @property
    def told(self) -> str:
        """Returns the version of Transformer Engine, or why it is not used, as text for a run's
        first log line; empty on a CPU.
        """
        if self.transformer_engine is not None:
            return f"Transformer Engine {'.'.join(map(str, self.transformer_engine))}"
        return f"without Transformer Engine: {self.why_not}" if self.why_not else ""


@functools.cache
def installed() -> Installed:
    """Returns which optional CUDA packages can be imported on this machine; on a CPU, none."""
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
    """Returns whether layers are built from Transformer Engine's modules: whether it is installed."""
    return installed().transformer_engine is not None


def _imported(name: str) -> tuple[Any, str]:
    """Returns (module, ""), or (None, error message) if the import fails with an exception of any
    type.
    """
    try:
        return importlib.import_module(name), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _is_there(name: str) -> bool:
    return _imported(name)[0] is not None


def version_of(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version string: 2.9.0+abc -> (2, 9, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", text)[0]))


def fused_kernels(
    found: Installed, model: ModelDescription, parallel: ParallelConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the fields of Megatron's TransformerConfig that enable the fused kernels of the
    packages in `found`; without packages, none are enabled.
    """
    engine = found.transformer_engine or ()
    fields = {
        # The fused kernel rotates queries and keys with one launch each; the unfused path fetches
        # the rows' lengths from the device, twice each. The fused one drops YaRN's factor on packed
        # rows, that of latent attention is experimental in Megatron-Core 0.16, and image positions
        # are not consecutive.
        "apply_rope_fusion": engine >= (1, 12)
        and not model.latent
        and not model.rope.yarn
        and not model.rope.long
        and not model.rope.sections
        and not model.rotated_pairs,
        "bias_activation_fusion": found.triton
        and model.activation == "silu"
        and model.gated
        and not model.clamped,
        # The kernel that computes weight gradients adds them to the fp32 sums.
        "gradient_accumulation_fusion": bool(engine) or found.weight_gradients,
        # For the local norm and attention, which are not used.
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        # The default dispatcher refuses variable lengths, even for dense models.
        "moe_token_dispatcher_type": "alltoall",
    }
    if model.experts:
        fields |= {
            "moe_grouped_gemm": bool(engine),
            "moe_permute_fusion": bool(engine) and found.permutation,
        }
        # DeepEP's kernels support bfloat16 only.
        if found.deep_ep and parallel.expert > 1 and dtype == torch.bfloat16:
            fields |= {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}
    return fields
