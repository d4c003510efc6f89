"""What a model is, in one vocabulary for every family and for both generations of transformers (4 and 5)."""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from model_providers import families
from model_providers.hf_config import HFConfig
from model_providers.rope import Rope, read_rope
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
    shared_ffn: int = 0  # of the expert that every token goes to
    shared_gate: bool = False  # it is weighted by a sigmoid of its own
    sigmoid: bool = False  # scores are sigmoids and carry a bias for the choice, instead of one softmax
    groups: int = 1  # experts are chosen within the best `active_groups` of these
    active_groups: int = 1
    scale: float = 1.0  # of the active experts' weights


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434): keys and values come from a narrow vector a token."""

    query_rank: int | None  # None: queries come straight from the hidden state
    key_value_rank: int
    plain_dim: int  # of a head's queries and keys, without position
    rope_dim: int  # with position; shared by the heads' keys
    value_dim: int


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
    rope: Rope
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    init_std: float
    window: int | None = None  # tokens that a token sees, itself included, in the layers `windowed`
    windowed: frozenset[int] = frozenset()
    latent: LatentAttention | None = None
    experts: Experts | None = None

    @property
    def parameters(self) -> int:
        """Weights of the whole model; tied embeddings count once."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm and not self.latent else 0)
        sparse = len(self.experts.layers) if self.experts else 0
        mlps = (self.layers - sparse) * 3 * self.hidden * self.ffn
        if experts := self.experts:
            shared = 3 * experts.shared_ffn + (1 if experts.shared_gate else 0)
            routed = experts.number * (3 * experts.ffn + 1)  # 1: the router's row
            mlps += sparse * self.hidden * (routed + shared)
        outside = self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (self._attention_parameters + norms) + mlps + outside

    @property
    def _attention_parameters(self) -> int:
        if latent := self.latent:
            query = self.heads * (latent.plain_dim + latent.rope_dim)
            rank = latent.query_rank
            queries = self.hidden * query if rank is None else rank * (self.hidden + 1 + query)
            down = self.hidden * (latent.key_value_rank + latent.rope_dim) + latent.key_value_rank
            up = latent.key_value_rank * self.heads * (latent.plain_dim + latent.value_dim)
            return queries + down + up + self.heads * latent.value_dim * self.hidden
        biases = self.head_dim * (self.heads + 2 * self.groups) if self.qkv_bias else 0
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.groups) + biases


FAMILIES = tuple(sorted(module.name for module in pkgutil.iter_modules(families.__path__)))


def describe(hf_config: Mapping[str, Any]) -> ModelDescription:
    """Raises CheckpointError, naming the field, for a family or a setting that Megatron-Core 0.16 can't represent here."""
    family = hf_config.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(f"model_type={family!r} is not supported; these are: {', '.join(FAMILIES)}.")
    config = HFConfig(hf_config)
    found: ModelDescription = importlib.import_module(f"{families.__name__}.{family}").describe(config)
    config.refuse_unread()
    return found


def decoder(config: HFConfig, *, qkv_bias: bool = False, qk_norm: bool = False) -> ModelDescription:
    """What the families have in common: Llama's shape. A family changes the rest with dataclasses.replace."""
    config.only("hidden_act", "silu", why="this family is trained with it")
    config.only("mlp_bias", False, why="the layers are built without")
    config.only("attention_bias", False, qkv_bias, why="it would put a bias on o_proj, too")
    config.only("attention_dropout", 0.0, why="set model.dropout instead")
    config.only("quantization_config", None, why="quantised weights can't be trained; convert the folder to bfloat16 first")
    heads = config["num_attention_heads"]
    return ModelDescription(
        family=config["model_type"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=heads,
        groups=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim", config["hidden_size"] // heads),
        vocabulary=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm_epsilon=config["rms_norm_eps"],
        rope=read_rope(config),
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        init_std=config.get("initializer_range", 0.02),
    )


def with_windows(
    model: ModelDescription, config: HFConfig, *, used: bool, default: int | None, first: int = 0
) -> ModelDescription:
    """Adds the sliding window: in the layers that `layer_types` lists, or else from layer `first` on.

    `default` is the window that transformers takes where config.json does not name the field (null means none).
    """
    window = config.get("sliding_window", None if "sliding_window" in config.named else default)
    kinds = config.get(
        "layer_types", ["sliding_attention" if layer >= first else "full_attention" for layer in range(model.layers)]
    )
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise CheckpointError(f"layer_types has {sorted(unknown)[0]!r}; full_attention and sliding_attention are supported.")
    windowed = frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    return replace(model, window=window, windowed=windowed) if used and window and windowed else model


def qwen_windows(model: ModelDescription, config: HFConfig) -> ModelDescription:
    """Qwen's: off unless `use_sliding_window` says so, and then from `max_window_layers` on."""
    used, first = config.get("use_sliding_window", False), config.get("max_window_layers", 28)
    return with_windows(model, config, used=used, default=4096, first=first)


def layout_violations(model: ModelDescription, parallel: ParallelConfig) -> list[str]:
    """Why this model can't be split like that, each with the nearest that can; empty when it can."""
    found = heads_violations(model, parallel.tensor, "parallel.tensor")
    if latent := model.latent:
        for name, size in (
            ("q_lora_rank", latent.query_rank),
            ("kv_lora_rank + qk_rope_head_dim", latent.key_value_rank + latent.rope_dim),
        ):
            if size and size % parallel.tensor:
                found.append(_no_divisor("parallel.tensor", parallel.tensor, name, size))
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
