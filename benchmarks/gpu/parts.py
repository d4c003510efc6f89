"""Lists the parts of the benchmark, the most important first: their requirements, and their rows in
docs/results.md.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

MEGATRON = ("rftmega.runtime.device.before_megatron", "megatron.core", "transformers")
TRANSFORMER_ENGINE = "transformer_engine"


class Part(NamedTuple):
    """Part is a module of this package with `SIZES`, `SMALL` and `measure(world, sheet, sizes)`."""

    module: str
    rows: tuple[str, ...]
    needs: tuple[str, ...] = MEGATRON  # modules, imported in this order
    without: str = ""  # a package that counts as not installed
    changes: Mapping[str, Any] = {}  # changes to the sizes

    def sizes(self, *, small: bool) -> Any:
        """Returns the module's sizes with the part's changes; imports the module."""
        module = importlib.import_module(f"benchmarks.gpu.{self.module}")
        return (module.SMALL if small else module.SIZES)._replace(**self.changes)


PARTS = {
    "loop": Part(
        "loop",
        ("model", "Megatron", "FSDP2", "LoRA"),
        needs=(*MEGATRON, "rftmega.rollout.engines.vllm"),
    ),
    "pretrained": Part(
        "pretrained",
        ("Megatron", "FSDP2", "TRL", "LoRA", "TRL with vLLM"),
        needs=(*MEGATRON, "rftmega.rollout.engines.vllm"),
    ),
    "features": Part(
        "features",
        ("MoE", "images"),
        needs=(*MEGATRON, "rftmega.rollout.engines.vllm"),
    ),
    "log_probs": Part("log_probs", ("fused", "dense", "fused against dense")),
    "offload": Part("offload", ("off and on", "three cycles")),
    "push": Part("push", ("8B", "30B-A3B")),
    "mfu": Part(
        "mfu",
        ("layers that fit", "no recomputation", "full recomputation"),
        without=TRANSFORMER_ENGINE,
    ),
    "mfu_te": Part(
        "mfu",
        ("layers that fit", "no recomputation", "full recomputation"),
        needs=(*MEGATRON, "transformer_engine.pytorch"),
    ),
    "mfu_fsdp": Part(
        "mfu",
        ("layers that fit", "no recomputation", "full recomputation"),
        changes={"backend": "fsdp"},
    ),
    "mfu_moe": Part(
        "mfu",
        ("layers that fit", "no recomputation", "full recomputation"),
        needs=(*MEGATRON, "transformer_engine.pytorch"),
        changes={"experts": True},
    ),
    "mfu_lora": Part(
        "mfu",
        ("layers that fit", "no recomputation", "full recomputation"),
        needs=(*MEGATRON, "transformer_engine.pytorch"),
        changes={"lora_rank": 16},
    ),
    "engine": Part(
        "engine",
        ("start", "first push", "push", "sleep and wake", "tokens"),
        needs=(*MEGATRON, "rftmega.rollout.engines.vllm"),
    ),
    "completions": Part(
        "completions",
        ("after the first push", "after sleep and other weights"),
        needs=(*MEGATRON, "rftmega.rollout.engines.vllm"),
    ),
}


def missing(part: Part) -> str:
    """Returns why a part can't run here; "" if it can.

    A package counts only if it can be imported.
    """
    if part.without:
        assert not sys.modules.get(part.without), (
            f"{part.without} was imported before the part that goes without"
        )
        sys.modules[part.without] = None  # type: ignore[assignment]  # importing it raises ImportError from now on
    for name in part.needs:
        try:
            importlib.import_module(name)
        except Exception as error:  # a library built for another version may raise anything
            return f"{name.removeprefix('rftmega.rollout.engines.')}: {type(error).__name__}: {error}".splitlines()[
                0
            ]
    return ""
