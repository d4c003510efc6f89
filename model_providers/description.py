"""What a config.json says, in one vocabulary for every family and for both generations of transformers (4 and 5)."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftmega.config import ParallelConfig
from rftmega.errors import CheckpointError


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in a model's sparse layers."""

    number: int
    active: int  # experts a token goes to
    ffn: int  # of one expert
    layers: frozenset[int]  # which layers have experts; the others are dense
    normalised: bool  # the active experts' weights add up to 1


@dataclass(frozen=True)
class ModelDescription:
    """A decoder. Sizes are the whole model's, before any sharding."""

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
    experts: Experts | None = None

    @property
    def parameters(self) -> int:
        """Weights of the whole model; tied embeddings count once."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.groups)
        biases = self.head_dim * (self.heads + 2 * self.groups) if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        sparse = len(self.experts.layers) if self.experts else 0
        mlps = (self.layers - sparse) * 3 * self.hidden * self.ffn
        if self.experts:
            mlps += sparse * self.experts.number * self.hidden * (3 * self.experts.ffn + 1)  # 1: the router's row
        outside = self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + biases + norms) + mlps + outside


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
    from model_providers import llama, qwen2, qwen3, qwen3_moe  # the families use this module's parts

    families: dict[str, Callable[[dict[str, Any]], ModelDescription]] = {
        "llama": llama.describe,
        "qwen2": qwen2.describe,
        "qwen3": qwen3.describe,
        "qwen3_moe": qwen3_moe.describe,
    }
    family = hf_config.get("model_type")
    if family not in families:
        raise CheckpointError(f"model_type={family!r} is not supported; these are: {', '.join(families)}.")
    try:
        return families[family](hf_config)
    except KeyError as missing:
        raise CheckpointError(f"config.json of this {family} model has no {missing}.") from missing


def decoder_description(hf_config: dict[str, Any], *, qkv_bias: bool, qk_norm: bool) -> ModelDescription:
    """What Llama-shaped configs have in common; a family with experts adds them."""
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
    """Why this model can't be split like that, each with the nearest that can; empty when it can."""
    found = heads_violations(model, parallel.tensor, "parallel.tensor")
    if model.ffn % parallel.tensor:
        found.append(_no_divisor("parallel.tensor", parallel.tensor, "intermediate_size", model.ffn))
    try:
        stage_layers(model.layers, parallel)
    except ValueError as reason:
        found.append(str(reason))
    return found + _expert_violations(model.experts, parallel)


def _expert_violations(experts: Experts | None, parallel: ParallelConfig) -> list[str]:
    found = []
    if experts is None:
        for option in ("expert", "expert_tensor"):
            if (value := getattr(parallel, option)) > 1:
                found.append(f"parallel.{option}={value}: this model has no experts. Set it to 1.")
        return found
    if experts.number % parallel.expert:
        found.append(_no_divisor("parallel.expert", parallel.expert, "number of experts,", experts.number))
    if experts.ffn % parallel.expert_tensor:
        found.append(_no_divisor("parallel.expert_tensor", parallel.expert_tensor, "moe_intermediate_size", experts.ffn))
    if parallel.tensor > 1 and not parallel.sequence:
        found.append(
            f"parallel.tensor={parallel.tensor} with experts needs parallel.sequence=true: otherwise every tensor-parallel "
            "process would send the same tokens to the experts."
        )
    return found


def _no_divisor(option: str, value: int, of: str, size: int) -> str:
    nearest = min((n for n in range(1, size + 1) if size % n == 0), key=lambda n: (abs(n - value), n))
    return f"{option}={value} does not divide the model's {of} {size}; the nearest that does is {nearest}."


def stage_layers(layers: int, parallel: ParallelConfig) -> list[list[range]]:
    """[stage][chunk] -> the layers it holds. Raises ValueError, with the nearest that works, where they can't be split so.

    Chunks run in the order stage 0 chunk 0, stage 1 chunk 0, ..., stage 0 chunk 1, ...
    """
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    others = stages - (first > 0) - (last > 0)
    rest = layers - first - last
    if others == 0 and rest:
        raise ValueError(
            f"parallel.first_stage_layers + parallel.last_stage_layers = {first} + {last}, but the {stages} stages must hold the "
            f"model's {layers} layers. Set one of them to 0: it takes what is left."
        )
    if rest < others or (others and rest % others):
        named = f" between the first ({first or 'even'}) and the last ({last or 'even'})" if first or last else ""
        fits = [n for n in range(1, layers + 1) if layers % n == 0]
        nearest = min(fits, key=lambda n: (abs(n - stages), n))
        raise ValueError(
            f"parallel.pipeline={stages} does not divide the model's {layers} layers evenly{named}. The nearest that does is "
            f"{nearest}; or set parallel.first_stage_layers or parallel.last_stage_layers so that {others} stage(s) share it."
        )
    sizes = [rest // others if others else 0] * stages
    sizes[0], sizes[-1] = first or sizes[0], last or sizes[-1]
    if uneven := [size for size in sizes if size % chunks]:
        fits = [n for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes)]
        raise ValueError(
            f"parallel.virtual_pipeline={chunks} does not divide the {uneven[0]} layers of a stage; "
            f"the nearest that does is {min(fits, key=lambda n: (abs(n - chunks), n))}."
        )
    found: list[list[range]] = [[] for _ in range(stages)]
    begin = 0
    for _ in range(chunks):
        for stage, size in enumerate(sizes):
            found[stage].append(range(begin, begin + size // chunks))
            begin += size // chunks
    return found


def heads_violations(model: ModelDescription, processes: int, option: str) -> list[str]:
    """Why `processes` can't share the attention heads; empty when they can."""
    found = []
    if model.heads % processes:
        found.append(_no_divisor(option, processes, "number of attention heads,", model.heads))
    if model.groups % processes and processes % model.groups:
        found.append(f"{option}={processes} neither divides the model's {model.groups} key-value heads nor is a multiple.")
    return found
