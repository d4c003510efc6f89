"""Model descriptions: one dataclass for all architectures, and for configs of transformers 4 and 5."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rftmega.config import ParallelConfig
from rftmega.converters.block_scales import FIELD, block_scales
from rftmega.converters.llama_like import LLAMA_LIKE
from rftmega.converters.mxfp4 import mxfp4
from rftmega.core.errors import CheckpointError
from rftmega.model_providers import families
from rftmega.model_providers.hf_config import HFConfig
from rftmega.model_providers.rope import Rope, read_rope, read_two_ropes
from rftmega.model_providers.tower import AudioTower, VisionTower
from rftmega.model_providers.transformers_decoders import refusal

FULL, SLIDING = "full_attention", "sliding_attention"  # values of layer_types


@dataclass(frozen=True)
class Experts:
    """Experts describes the routed and shared experts of a model's MoE layers."""

    number: int
    active: int  # experts per token
    ffn: int  # FFN size of one expert
    layers: frozenset[int]  # the MoE layers; the others are dense
    normalised: bool  # the active experts' weights sum to 1
    shared_ffn: int = 0  # FFN size of the shared expert
    shared_gate: bool = False  # a sigmoid gate weights the shared expert
    # scores are sigmoids with a selection bias, instead of one softmax
    sigmoid: bool = False
    groups: int = 1  # experts are selected within the best `active_groups` of these
    active_groups: int = 1
    scale: float = 1.0  # scaling factor of the active experts' weights

    def __post_init__(self) -> None:
        """Raises CheckpointError if more experts are active per token than there are, or the
        experts cannot be divided into the given number of groups.
        """
        if self.active > self.number:
            raise CheckpointError(
                f"num_experts_per_tok={self.active} is more than the {self.number} experts."
            )
        if self.active_groups > self.groups or self.number % self.groups:
            raise CheckpointError(
                f"topk_group={self.active_groups} of n_group={self.groups} can't be chosen from {self.number} experts: groups "
                "are of one size, and no more are chosen than there are."
            )


@dataclass(frozen=True)
class LatentAttention:
    """LatentAttention describes multi-head latent attention (arXiv:2405.04434): keys and values are
    computed from a low-rank vector per token.
    """

    query_rank: int | None  # None: queries are computed from the hidden state
    key_value_rank: int
    plain_dim: int  # per head, of queries and keys without RoPE
    rope_dim: int  # with RoPE; shared by the heads' keys
    value_dim: int


@dataclass(frozen=True)
class DeltaNet:
    """DeltaNet describes gated delta nets (arXiv:2412.06464), the linear attention of some layers;
    the other layers have attention.
    """

    layers: frozenset[int]
    key_heads: int  # of queries and keys
    value_heads: int  # a multiple of the key heads
    key_dim: int  # per head
    value_dim: int
    convolved: int  # tokens that the convolution of queries, keys and values covers

    @property
    def key_width(self) -> int:
        """Returns the size of all heads' queries, or keys, of one token."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Returns the size of all heads' values of one token."""
        return self.value_heads * self.value_dim

    @property
    def projected(self) -> int:
        """Returns the rows of the input projection: queries, keys, values, their gates, and two
        numbers for each value head.
        """
        return 2 * (self.key_width + self.value_width + self.value_heads)


@dataclass(frozen=True)
class Scales:
    """Scales holds constant factors, as in Granite (arXiv:2405.04324)."""

    embedding: float = 1.0
    rounded_embedding: bool = False  # the embedding's factor is rounded to the embedding's dtype
    residual: float = 1.0  # of what attention and MLP add to the hidden states
    attention: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    logits: float = 1.0


@dataclass(frozen=True)
class ClampedGate:
    """ClampedGate describes the gated activation of gpt-oss: with the gate g at most `limit` and
    the value x within -limit and limit, it is g sigmoid(alpha g) (x + 1).
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class ModelDescription:
    """ModelDescription describes the architecture of a decoder and its vision or audio encoder
    (`tower`); sizes are those of the whole model, before sharding.
    """

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
    activation: str = "silu"  # of the MLP, as config.json names it
    gated: bool = True  # the MLP has a gate
    clamped: ClampedGate | None = None  # instead of `activation`
    # output projections, experts and routers have a bias, besides q, k and v
    biased: bool = False
    sinks: bool = False  # each head has a learned term of the softmax's denominator
    output_gate: bool = False  # attention's output is multiplied by the sigmoid of a gate
    full_width_qk_norm: bool = False  # q and k norms span all heads, instead of each
    rotated_qk_norm: bool = False  # q and k norms follow rotary embeddings, instead of preceding
    pre_norm: bool = True  # norms precede attention and MLP
    post_norm: bool = False  # norms follow attention and MLP
    zero_centered: bool = False  # a norm multiplies by 1 + its weight
    window: int | None = None  # tokens attended to, including itself, in the layers `windowed`
    windowed: frozenset[int] = frozenset()
    unrotated: frozenset[int] = frozenset()  # layers without rotary embeddings
    rotated_pairs: bool = False  # rotary embeddings rotate neighbouring elements, not halves
    scales: Scales = Scales()
    latent: LatentAttention | None = None
    delta_net: DeltaNet | None = None
    experts: Experts | None = None
    tower: VisionTower | AudioTower | None = None  # on the first pipeline stage
    padding: int | None = None  # the token whose embedding row is not trained

    @property
    def parameters(self) -> int:
        """Returns the number of parameters of the whole model; tied embeddings count once."""
        normed = self.heads + self.groups if self.full_width_qk_norm else 2
        of_heads = normed * self.head_dim if self.qk_norm and not self.latent else 0
        norms = 2 * (self.pre_norm + self.post_norm) * self.hidden
        sparse = len(self.experts.layers) if self.experts else 0
        mlps = (self.layers - sparse) * self.mlp_matrices * self.hidden * self.ffn
        if experts := self.experts:
            shared = 3 * experts.shared_ffn + (1 if experts.shared_gate else 0)
            routed = experts.number * (3 * experts.ffn + 1)  # 1: the router's row
            mlps += sparse * self.hidden * (routed + shared)
            if self.biased:
                mlps += sparse * experts.number * (2 * experts.ffn + self.hidden + 1)
        outside = self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)
        tower = self.tower.parameters if self.tower else 0
        attention = self.attention_layers * (self._attention_parameters + of_heads)
        if net := self.delta_net:
            convolution = net.convolved * (2 * net.key_width + net.value_width)
            linear = self.hidden * (net.projected + net.value_width) + convolution
            attention += len(net.layers) * (linear + 2 * net.value_heads + net.value_dim)
        return self.layers * norms + attention + mlps + outside + tower

    @property
    def attention_layers(self) -> int:
        """Returns the number of layers with attention, instead of a gated delta net."""
        return self.layers - (len(self.delta_net.layers) if self.delta_net else 0)

    @property
    def mlp_matrices(self) -> int:
        """Returns the number of matrices of a dense MLP: up and down, and the gate's."""
        return 3 if self.gated else 2

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
        biases += self.hidden if self.biased else 0
        sinks = self.heads if self.sinks else 0
        gates = self.heads if self.output_gate else 0
        rows = 2 * self.heads + 2 * self.groups + gates
        return self.hidden * self.head_dim * rows + biases + sinks


FAMILIES = tuple(
    sorted({*(module.name for module in pkgutil.iter_modules(families.__path__)), *LLAMA_LIKE})
)
LLAMA = "rftmega.model_providers.llama_like"
LINEAR = "gated delta net (linear attention) for packed rows"
LIGHTNING_INDEX = "sparse attention with an indexer"
MAMBA = "Mamba layers for packed rows"
# architectures that are often asked for -> what this Megatron lacks for them
MISSING = {
    **dict.fromkeys(("olmo_hybrid", "kimi_linear"), LINEAR),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), LIGHTNING_INDEX),
    **dict.fromkeys(("nemotron_h", "falcon_h1", "bamba", "granitemoehybrid", "jamba"), MAMBA),
    **dict.fromkeys(("mamba", "mamba2"), MAMBA),
    **dict.fromkeys(("llama4", "llama4_text"), "attention within chunks of rows"),
    "minimax": "lightning attention",
    "gemma2": "soft cap of attention scores",
    "gemma3": "SigLIP vision tower; gemma3_text is supported",
    "olmo3": "YaRN in some layers only",
}


def describe(hf_config: Mapping[str, Any], *, refused: Callable[[], str] = str) -> ModelDescription:
    """Returns the description of the model of `hf_config`, the content of a Hugging Face
    config.json.

    Raises CheckpointError, naming the field, for an unsupported architecture, or a setting that
    Megatron-Core 0.16 can't represent here. The error for an architecture says whether backend=fsdp
    trains the model; `refused` returns the reason why it can't read the model's weights, "" if it
    can or if there are none.
    """
    try:
        return described(hf_config)
    except UnknownFamilyError as error:
        raise CheckpointError(f"{error} {_other_backend(hf_config, refused)}") from error


class UnknownFamilyError(CheckpointError):
    """Raised for a model_type that backend=megatron does not support."""


def _other_backend(hf_config: Mapping[str, Any], refused: Callable[[], str]) -> str:
    """Returns what an error says of backend=fsdp for a model that Megatron's does not support."""
    if why := refusal(hf_config) or refused():
        return f"backend=fsdp can't train it either: {why.rstrip('.')}. Choose another model, or correct its config.json."
    return "backend=fsdp accepts this config.json: set it, and let `rftmega check` compare the model with transformers."


def described(hf_config: Mapping[str, Any]) -> ModelDescription:
    """Returns the same as `describe`. Its errors don't name another backend."""
    family = hf_config.get("model_type")
    if family not in FAMILIES:
        missing = MISSING.get(str(family), "")
        why = f": Megatron-Core 0.16 has no {missing}" if missing else ""
        raise UnknownFamilyError(
            f"model_type={family!r} is not supported by backend=megatron{why}; these are: {', '.join(FAMILIES)}."
        )
    config = HFConfig(hf_config)
    found: ModelDescription
    if family in LLAMA_LIKE:
        found = importlib.import_module(LLAMA).describe(config, LLAMA_LIKE[family])
    else:
        found = importlib.import_module(f"{families.__name__}.{family}").describe(config)
    config.refuse_unread()
    return found


def decoder(
    config: HFConfig,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    partial_rope: bool = False,
    activation: str = "silu",
    activation_field: str = "hidden_act",
    two_ropes: bool = False,
    biased: bool = False,
    packed: bool = False,
    rope_ignores: tuple[str, ...] = (),
) -> ModelDescription:
    """Returns the description of a Llama-like decoder; functions of other architectures call this
    one and change the result with dataclasses.replace.

    `qkv_bias`: q, k and v have a bias. `qk_norm`: RMSNorm over each head of q and k. `head_dim`:
    None to read it from `config`. `partial_rope`: RoPE may cover only a part of each head.
    `activation`: the only supported value of the field `activation_field`. `two_ropes`: layers with
    a sliding window have other rotary embeddings. `biased`: o_proj has the bias of q, k and v.
    `packed`: experts' weights may be packed in MXFP4. `rope_ignores`: rope settings without effect
    in this architecture. Raises CheckpointError for inconsistent head
    sizes.
    """
    config.only(activation_field, activation, why="this family is trained with it")
    config.only("mlp_bias", False, why="the layers are built without")
    if not biased:
        config.only("attention_bias", False, qkv_bias, why="it would put a bias on o_proj, too")
    config.get(FIELD)
    if not packed or mxfp4(config) is None:
        block_scales(config)  # refuses other quantisation methods
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads", heads)
    if head_dim is None:
        head_dim = _head_dim(config)
    if heads % groups:
        raise CheckpointError(
            f"num_attention_heads={heads} is no multiple of num_key_value_heads={groups}."
        )
    rope = (
        read_two_ropes(config)
        if two_ropes
        else read_rope(config, partial=partial_rope, ignored=rope_ignores)
    )
    turned = int(head_dim * rope.fraction)
    if rope.fraction != 1.0 and (turned % 2 or not turned):
        raise CheckpointError(
            f"partial_rotary_factor={rope.fraction} of heads of {head_dim} gives {turned} elements, which rotary embeddings "
            "can't halve."
        )
    if rope.long and len(rope.long.divisors) != turned // 2:
        raise CheckpointError(
            f"rope short_factor lists {len(rope.long.divisors)} numbers; heads of {head_dim} need {turned // 2}."
        )
    if rope.sections and sum(rope.sections) != turned // 2:
        raise CheckpointError(
            f"rope mrope_section={list(rope.sections)} does not add up to half of what is rotated of a head, {turned // 2}."
        )
    return ModelDescription(
        family=config["model_type"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        vocabulary=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm_epsilon=config["rms_norm_eps"],
        rope=rope,
        tied=config["tie_word_embeddings"],
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        activation=activation,
        init_std=config["initializer_range"],
        biased=biased,
        padding=_padding(config),
    )


def _padding(config: HFConfig) -> int | None:
    """Returns the id of the padding token, whose embedding row is not trained, or None; a negative
    pad_token_id counts from the end of the vocabulary.
    """
    token = config.get("pad_token_id")
    if not isinstance(token, int) or isinstance(token, bool):
        return None
    size = config["vocab_size"]
    return token % size if -size <= token < size else None


def _head_dim(config: HFConfig) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width: int = config.get("head_dim", hidden // heads)
    if not width or width % 2:
        raise CheckpointError(
            f"hidden_size={hidden} and num_attention_heads={heads} give heads of head_dim={width}, which rotary embeddings can't "
            "halve. One of them is wrong."
        )
    return width


def with_windows(
    model: ModelDescription, config: HFConfig, *, used: bool, listed: Callable[[int], bool]
) -> ModelDescription:
    """Returns the description with sliding-window attention in the layers that config.json's
    `layer_types` lists, or, without `layer_types`, in the layers whose index `listed` accepts.

    `used`: False disables the window in all layers. Raises CheckpointError if `layer_types` does
    not match the model, or lists sliding windows without a window size.
    """
    window = config.get("sliding_window")
    if not used:
        window = None
    elif window == 0:
        raise CheckpointError("sliding_window=0: a window of no tokens. null is none.")
    kinds = config.get("layer_types")
    if kinds is None:  # only then may the other fields be what `listed` reads
        kinds = [SLIDING if window and listed(layer) else FULL for layer in range(model.layers)]
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise CheckpointError(
            f"layer_types has {sorted(unknown)[0]!r}; {FULL} and {SLIDING} are supported."
        )
    if len(kinds) != model.layers:
        raise CheckpointError(
            f"layer_types lists {len(kinds)} layers; num_hidden_layers is {model.layers}."
        )
    windowed = frozenset(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
    if windowed and not window:
        raise CheckpointError(
            f"layer_types lists {SLIDING}, but config.json gives no window (use_sliding_window, sliding_window)."
        )
    return replace(model, window=window, windowed=windowed) if windowed else model


def everywhere(model: ModelDescription, config: HFConfig) -> ModelDescription:
    """Returns the description with sliding-window attention in all layers if config.json has a
    window.
    transformers' Mistral ignores `layer_types`. Raises CheckpointError if `layer_types` lists
    layers without the window.
    """
    found = with_windows(model, config, used=True, listed=lambda layer: True)
    if len(found.windowed) != (model.layers if config.get("sliding_window") else 0):
        raise CheckpointError(
            "layer_types lists layers without the sliding window; this family's model in transformers has it in all of them. "
            "Leave layer_types out, or take another model_type."
        )
    return found


def qwen_windows(model: ModelDescription, config: HFConfig) -> ModelDescription:
    """Returns the description with Qwen's sliding window: unused unless `use_sliding_window` is
    set, then in the layers from `max_window_layers` on.
    """
    used, first = config["use_sliding_window"], config["max_window_layers"]
    return with_windows(model, config, used=used, listed=lambda layer: layer >= first)


def layout_violations(model: ModelDescription, parallel: ParallelConfig) -> list[str]:
    """Returns the reasons, as error messages, why a parallel layout does not fit the model, each
    with the nearest valid value; an empty list if the layout fits.
    """
    found = heads_violations(model, parallel.tensor, "parallel.tensor")
    if latent := model.latent:
        for name, size in (
            ("q_lora_rank", latent.query_rank),
            ("kv_lora_rank + qk_rope_head_dim", latent.key_value_rank + latent.rope_dim),
        ):
            if size and size % parallel.tensor:
                found.append(_no_divisor("parallel.tensor", parallel.tensor, name, size))
    if net := model.delta_net:
        mine = net.key_heads // parallel.tensor or 1
        if mine % parallel.context:
            what = "linear_num_key_heads of a tensor-parallel process,"
            found.append(_no_divisor("parallel.context", parallel.context, what, mine))
    if model.ffn % parallel.tensor:
        found.append(
            _no_divisor("parallel.tensor", parallel.tensor, "intermediate_size", model.ffn)
        )
    try:
        first = len(stage_layers(model.layers, parallel)[0][0])
    except ValueError as reason:
        found.append(str(reason))
    else:
        if model.tower and model.tower.deepstack > first:
            found.append(
                f"The first pipeline stage begins with {first} layers, and the vision tower feeds the first "
                f"{model.tower.deepstack}, which have to be together. Set parallel.first_stage_layers, or lower "
                "parallel.pipeline or parallel.virtual_pipeline."
            )
    return found + _expert_violations(model, parallel)


def _expert_violations(model: ModelDescription, parallel: ParallelConfig) -> list[str]:
    found = []
    if (experts := model.experts) is None:
        for option in ("expert", "expert_tensor"):
            if (value := getattr(parallel, option)) > 1:
                found.append(f"parallel.{option}={value}: this model has no experts. Set it to 1.")
        return found
    if experts.number % parallel.expert:
        found.append(
            _no_divisor("parallel.expert", parallel.expert, "number of experts,", experts.number)
        )
    if experts.ffn % parallel.expert_tensor:
        found.append(
            _no_divisor(
                "parallel.expert_tensor",
                parallel.expert_tensor,
                "moe_intermediate_size",
                experts.ffn,
            )
        )
    if model.biased and parallel.expert_tensor > 1:
        found.append(
            f"parallel.expert_tensor={parallel.expert_tensor}: this model's experts have biases, and Megatron-Core 0.16 splits "
            "experts without biases only. Set it to 1, and raise parallel.expert instead."
        )
    if parallel.tensor > 1 and not parallel.sequence:
        found.append(
            f"parallel.tensor={parallel.tensor} with experts needs parallel.sequence=true: otherwise every tensor-parallel "
            "process would send the same tokens to the experts."
        )
    return found


def _no_divisor(option: str, value: int, of: str, size: int) -> str:
    nearest = min(
        (n for n in range(1, size + 1) if size % n == 0), key=lambda n: (abs(n - value), n)
    )
    return f"{option}={value} does not divide the model's {of} {size}; the nearest that does is {nearest}."


def stage_layers(layers: int, parallel: ParallelConfig) -> list[list[range]]:
    """Returns the layers of each pipeline stage and model chunk: [stage][chunk] -> range of layer
    indices.
    Raises ValueError, with the nearest valid value, if the layers can't be divided over the stages.
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
        named = (
            f" between the first ({first or 'even'}) and the last ({last or 'even'})"
            if first or last
            else ""
        )
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
    """Returns the reasons, as error messages, why the attention heads can't be split over
    `processes` processes; an empty list if they can. `option`: the config option that sets the
    number of processes, for the messages.
    """
    found = []
    if model.heads % processes:
        found.append(_no_divisor(option, processes, "number of attention heads,", model.heads))
    if model.groups % processes and processes % model.groups:
        found.append(
            f"{option}={processes} neither divides the model's {model.groups} key-value heads nor is a multiple."
        )
    if (net := model.delta_net) and net.key_heads % processes:
        found.append(_no_divisor(option, processes, "linear_num_key_heads", net.key_heads))
    return found
