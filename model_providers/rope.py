"""Rotary position embeddings (arXiv:2104.09864) and the ways of stretching them that Megatron-Core 0.16 knows."""

import math
from dataclasses import dataclass
from typing import Any

from model_providers.hf_config import HFConfig
from rftmega.errors import CheckpointError


@dataclass(frozen=True)
class Yarn:
    """How YaRN (arXiv:2309.00071) blends interpolated and plain frequencies."""

    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


@dataclass(frozen=True)
class Rope:
    """`kind` is default, linear, llama3 or yarn; `factor` is how much longer texts may be."""

    base: float
    kind: str = "default"
    factor: float = 1.0
    yarn: Yarn | None = None


def read_rope(config: HFConfig) -> Rope:
    """transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` and `rope_scaling` (with `type` or `rope_type`).

    Raises CheckpointError, naming the field, for what Megatron can't represent.
    """
    fields = _fields(config)
    base, kind = fields.pop("rope_theta"), fields.pop("rope_type")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise CheckpointError(f"rope_type={kind!r} is not supported; default, linear, llama3 and yarn are.")
    factor = fields.pop("factor", 1.0) if kind != "default" else 1.0
    if (partial := fields.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise CheckpointError(f"partial_rotary_factor={partial} is not supported: the whole head is rotated.")
    if kind == "llama3":
        # Megatron hard-codes these three; another value would silently be another model.
        for name, only in (("low_freq_factor", 1), ("high_freq_factor", 4), ("original_max_position_embeddings", 8192)):
            if (value := fields.pop(name, None)) != only:
                raise CheckpointError(f"rope {name}={value} is not supported: Megatron-Core 0.16 knows {only} only.")
    yarn = _yarn(fields, factor, config) if kind == "yarn" else None
    if fields:
        said = ", ".join(f"{name}={value}" for name, value in fields.items())
        raise CheckpointError(f"rope parameters of type {kind} have {said}, which is not honoured here.")
    return Rope(base, kind, factor, yarn)


def _fields(config: HFConfig) -> dict[str, Any]:
    theta = config.get("rope_theta", 10000.0)
    fields = {
        name: value
        for name, value in (config.get("rope_parameters") or config.get("rope_scaling") or {}).items()
        if value is not None
    }
    if any(isinstance(value, dict) for value in fields.values()):
        raise CheckpointError("rope_parameters differ between layer types, which is not supported.")
    older = fields.pop("type", "default")
    return {"rope_type": older, "rope_theta": theta} | fields


def _yarn(fields: dict[str, Any], factor: float, config: HFConfig) -> Yarn:
    yarn = Yarn(
        original_positions=fields.pop("original_max_position_embeddings", config["max_position_embeddings"]),
        beta_fast=fields.pop("beta_fast", 32.0),
        beta_slow=fields.pop("beta_slow", 1.0),
        mscale=fields.pop("mscale", None),
        mscale_all_dim=fields.pop("mscale_all_dim", None),
        truncate=fields.pop("truncate", True),
    )
    if (yarn.mscale is None) != (yarn.mscale_all_dim is None):
        raise CheckpointError("rope mscale and mscale_all_dim of yarn must be given both or neither.")
    attention = fields.pop("attention_factor", None)
    usual = _attention_factor(factor, yarn)
    if attention is not None and not math.isclose(attention, usual, rel_tol=1e-6):
        raise CheckpointError(f"rope attention_factor={attention} is not supported: Megatron-Core 0.16 always takes {usual:.6g}.")
    return yarn


def _attention_factor(factor: float, yarn: Yarn) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if yarn.mscale and yarn.mscale_all_dim:
        return scale(yarn.mscale) / scale(yarn.mscale_all_dim)
    return scale(1.0)
