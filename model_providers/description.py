"""What a config.json says, in one vocabulary for every family and for both generations of transformers (4 and 5)."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftmega.config import ParallelConfig
from rftmega.errors import CheckpointError


@dataclass(frozen=True)
class ModelDescription:
    """A dense decoder. Sizes are the whole model's, before any sharding."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int  # key-value heads
    head_dim: int
    vocabulary: int
    max_positions: int
    norm_epsilon: float
    rope_base: float
    rope_linear_factor: float | None
    rope_llama3_factor: float | None
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    init_std: float

    @property
    def parameters(self) -> int:
        """Weights of the whole model; tied embeddings count once."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.groups)
        biases = self.head_dim * (self.heads + 2 * self.groups) if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + biases + norms + 3 * self.hidden * self.ffn
        return self.layers * layer + self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises CheckpointError where it is missing or not JSON."""
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no config.json, so it is not a Hugging Face model folder.") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error


def describe(hf_config: dict[str, Any]) -> ModelDescription:
    """Raises CheckpointError, naming the field, for a family or a setting that Megatron-Core 0.16 can't represent here."""
    from model_providers import llama, qwen2, qwen3  # the families use this module's parts

    families: dict[str, Callable[[dict[str, Any]], ModelDescription]] = {
        "llama": llama.describe,
        "qwen2": qwen2.describe,
        "qwen3": qwen3.describe,
    }
    family = hf_config.get("model_type")
    if family not in families:
        raise CheckpointError(f"model_type={family!r} is not supported; these are: {', '.join(families)}.")
    try:
        return families[family](hf_config)
    except KeyError as missing:
        raise CheckpointError(f"config.json of this {family} model has no {missing}.") from missing


def dense_description(hf_config: dict[str, Any], *, qkv_bias: bool, qk_norm: bool) -> ModelDescription:
    """What Llama-shaped configs have in common."""
    if (act := hf_config.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"hidden_act={act!r} is not supported; this family is trained with silu.")
    if hf_config.get("mlp_bias"):
        raise CheckpointError("mlp_bias=true is not supported.")
    if hf_config.get("use_sliding_window") and hf_config.get("sliding_window"):
        raise CheckpointError("use_sliding_window=true is not supported yet.")
    heads = hf_config["num_attention_heads"]
    rope = rope_parameters(hf_config)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        raise CheckpointError(f"rope_type={kind!r} is not supported; default, linear and llama3 are.")
    if kind == "llama3":
        # Megatron hard-codes these three; another value would silently be another model.
        for name, only in (("low_freq_factor", 1), ("high_freq_factor", 4), ("original_max_position_embeddings", 8192)):
            if rope[name] != only:
                raise CheckpointError(f"rope {name}={rope[name]} is not supported: Megatron-Core 0.16 knows {only} only.")
    return ModelDescription(
        family=hf_config["model_type"],
        layers=hf_config["num_hidden_layers"],
        hidden=hf_config["hidden_size"],
        ffn=hf_config["intermediate_size"],
        heads=heads,
        groups=hf_config.get("num_key_value_heads") or heads,
        head_dim=hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
        vocabulary=hf_config["vocab_size"],
        max_positions=hf_config["max_position_embeddings"],
        norm_epsilon=hf_config["rms_norm_eps"],
        rope_base=rope["rope_theta"],
        rope_linear_factor=rope["factor"] if kind == "linear" else None,
        rope_llama3_factor=rope["factor"] if kind == "llama3" else None,
        tied=hf_config.get("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        init_std=hf_config.get("initializer_range", 0.02),
    )


def rope_parameters(hf_config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` and `rope_scaling` (with `type` or `rope_type`)."""
    rope = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", hf_config.get("rope_theta", 10000.0))
    return rope


def layout_violations(model: ModelDescription, parallel: ParallelConfig) -> list[str]:
    """Why this model can't be split like that, each with what to change; empty when it can."""
    found = []
    tensor, pipeline = parallel.tensor, parallel.pipeline
    found += heads_violations(model, tensor, "parallel.tensor")
    if model.ffn % tensor:
        found.append(f"parallel.tensor={tensor} does not divide intermediate_size={model.ffn}.")
    if model.layers % pipeline:
        fits = [n for n in range(1, model.layers + 1) if model.layers % n == 0]
        found.append(f"parallel.pipeline={pipeline} does not divide the model's {model.layers} layers; {fits} do.")
    return found


def heads_violations(model: ModelDescription, processes: int, option: str) -> list[str]:
    """Why `processes` can't share the attention heads; empty when they can."""
    found = []
    if model.heads % processes:
        found.append(f"{option}={processes} does not divide the model's {model.heads} attention heads.")
    if model.groups % processes and processes % model.groups:
        found.append(f"{option}={processes} neither divides the model's {model.groups} key-value heads nor is a multiple.")
    return found
