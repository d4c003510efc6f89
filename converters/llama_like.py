"""Architectures whose decoder is Llama's with a few differences, as data: LLAMA_LIKE has an entry
for each `model_type`. `model_providers/llama_like.py` builds their models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import (
    USUAL_NAMES,
    Config,
    NormNames,
    decoder,
    dense_mlp,
    grouped_attention,
)
from rftmega.converters.rules import Rule


@dataclass(frozen=True)
class LlamaLike:
    """LlamaLike describes an architecture by its differences from Llama."""

    fields: Fields  # of config.json, with their defaults
    # q, k and v have a bias; a text names the field of config.json that decides
    qkv_bias: bool | str = False
    # RMSNorms of q and k: in each head, before or after rotary embeddings, or over all heads
    qk_norm: Literal["", "head", "rotated head", "all heads"] = ""
    pre_norm: bool = True  # norms precede attention and MLP
    post_norm: bool = False  # norms follow attention and MLP
    zero_centered: bool = False  # a norm multiplies by 1 + its weight
    fused_qkv: bool = False  # the folder has q, k and v in one tensor
    fused_mlp: bool = False  # the folder has gate and up in one tensor
    norm_names: NormNames = USUAL_NAMES  # in the folder
    gated: bool = True  # the MLP has a gate
    activation: str = "silu"  # only value of the field `activation_field`
    activation_field: str = "hidden_act"
    partial_rope: bool = False  # rotary embeddings may cover a part of each head
    rotated_pairs: bool = False  # they rotate neighbouring elements, instead of halves of a head
    rope_types: tuple[str, ...] = ()  # those supported; empty: all that Megatron supports
    two_ropes: bool = False  # layers with a sliding window have rotary embeddings of their own
    # layers without rotary embeddings: those of `no_rope_layers` (SmolLM3, where 0 is without), or
    # those without a sliding window, if the model has one (EXAONE 4)
    unrotated: Literal["", "no_rope_layers", "full_attention"] = ""
    # layers with a sliding window: all, Qwen's from `max_window_layers` on, all but each n-th
    # (`sliding_window_pattern`), or those without rotary embeddings
    windows: Literal["", "all", "late", "pattern", "unrotated"] = ""
    # factors: of embedding, residual, attention and logits, each a field (Granite), or of embedding
    # and attention, from sizes (Gemma)
    scaled: Literal["", "fields", "sizes"] = ""
    divided: bool = False  # hidden_size must be a multiple of num_attention_heads
    # field of config.json -> (its only supported value, why)
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()  # fields of config.json that this decoder does not use

    def table(self, config: Config) -> list[Rule]:
        """Returns the conversion rules of all tensors."""
        attention = grouped_attention(
            config,
            qkv_bias=self.has_qkv_bias(config),
            qk_norm=self.qk_norm == "head",
            rotated_qk_norm=self.qk_norm == "rotated head",
            full_width_qk_norm=self.qk_norm == "all heads",
            fused=self.fused_qkv,
        )
        names = ("gate_up_proj",) if self.fused_mlp else ("gate_proj", "up_proj")
        above = names if self.gated else ("up_proj",)
        mlp = dense_mlp(config, projections=(*above, "down_proj"), gated=self.gated)
        return decoder(
            config,
            attention,
            mlp,
            pre_norm=self.pre_norm,
            post_norm=self.post_norm,
            names=self.norm_names,
        )

    def has_qkv_bias(self, config: Config) -> bool:
        if isinstance(self.qkv_bias, str):
            return bool(config[self.qkv_bias])
        return self.qkv_bias


NO_BIAS = {"attention_bias": False, "mlp_bias": False}
QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
GROUPS, WIDTH, PADDING = "num_key_value_heads", "head_dim", "pad_token_id"

LLAMA_LIKE: dict[str, LlamaLike] = {
    "llama": LlamaLike(  # Llama 2 and 3
        Fields(
            defaults={GROUPS: None, WIDTH: None, **NO_BIAS},
            nullable=(GROUPS, WIDTH, "attention_dropout"),
        ),
        divided=True,
        only={"rope_interleaved": (False, "Llama rotates halves of a head")},
    ),
    "mistral": LlamaLike(
        Fields(
            defaults={GROUPS: 8, WIDTH: None, "sliding_window": 4096},
            nullable=(WIDTH, "sliding_window"),
        ),
        windows="all",
    ),
    "qwen2": LlamaLike(  # Qwen2 and Qwen2.5
        Fields(
            defaults={GROUPS: 32, **QWEN_WINDOWS},
            nullable=(GROUPS, "sliding_window"),
            not_null=(WIDTH,),
        ),
        qkv_bias=True,
        windows="late",
        only={"use_mrope": (False, "positions of images are not represented")},
    ),
    "qwen3": LlamaLike(
        Fields(
            defaults={GROUPS: 32, WIDTH: 128, "attention_bias": False, **QWEN_WINDOWS},
            nullable=(GROUPS, "sliding_window"),
        ),
        qk_norm="head",
        windows="late",
    ),
    "phi3": LlamaLike(  # Phi-3 and Phi-4
        Fields(
            defaults={
                **{GROUPS: None, PADDING: 32000, "sliding_window": None},
                **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "original_max_position_embeddings": 4096},
            },
            nullable=(GROUPS, "sliding_window", PADDING),
            not_null=(WIDTH, "partial_rotary_factor"),
        ),
        fused_qkv=True,
        fused_mlp=True,
        partial_rope=True,
        rope_types=("default", "longrope"),
        windows="all",
        without_effect=("original_max_position_embeddings",),  # unless it is longrope
    ),
    "olmo2": LlamaLike(
        Fields(
            defaults={GROUPS: None, "attention_bias": False, PADDING: 1},
            nullable=(GROUPS, PADDING),
            not_null=(WIDTH,),
        ),
        qk_norm="all heads",
        pre_norm=False,
        post_norm=True,
    ),
    "seed_oss": LlamaLike(
        Fields(
            defaults={
                **{GROUPS: 8, WIDTH: 128, PADDING: 1, "attention_bias": True, "mlp_bias": False},
                **{"attention_out_bias": False, "attention_dropout": 0.1, "residual_dropout": 0.1},
            },
            nullable=(GROUPS, WIDTH, PADDING),
        ),
        qkv_bias="attention_bias",
        only={"attention_out_bias": (False, "o_proj is built without")},
    ),
    "arcee": LlamaLike(
        Fields(
            defaults={GROUPS: None, WIDTH: None, "hidden_act": "relu2", **NO_BIAS},
            nullable=(GROUPS, WIDTH),
        ),
        gated=False,
        activation="relu2",
    ),
    "smollm3": LlamaLike(
        Fields(
            defaults={
                **{GROUPS: 4, PADDING: 128004, "tie_word_embeddings": True, **NO_BIAS},
                **{"no_rope_layers": None, "no_rope_layer_interval": 4},
                **{"use_sliding_window": False, "sliding_window": None},
            },
            nullable=(GROUPS, PADDING, "no_rope_layers", "sliding_window"),
            not_null=(WIDTH,),
            rope_theta=2e6,
        ),
        unrotated="no_rope_layers",
        windows="unrotated",
    ),
    "granite": LlamaLike(
        Fields(
            defaults={
                **{GROUPS: None, **NO_BIAS, "embedding_multiplier": 1.0, "logits_scaling": 1.0},
                **{"residual_multiplier": 1.0, "attention_multiplier": 1.0},
            },
            nullable=(GROUPS,),
            not_null=(WIDTH,),
        ),
        scaled="fields",
    ),
    "exaone4": LlamaLike(
        Fields(
            defaults={GROUPS: 32, "sliding_window": 4096, "sliding_window_pattern": 4},
            nullable=("sliding_window", "sliding_window_pattern"),
            not_null=(WIDTH,),
        ),
        qk_norm="head",
        pre_norm=False,
        post_norm=True,
        unrotated="full_attention",
        windows="pattern",
    ),
    "gemma3_text": LlamaLike(
        Fields(
            defaults={
                **{GROUPS: 4, WIDTH: 256, PADDING: 0, "tie_word_embeddings": True},
                **{"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
                **{"sliding_window": 4096, "sliding_window_pattern": 6},
                **{"query_pre_attn_scalar": 256},
            },
            nullable=(PADDING, "sliding_window", "attention_dropout", "hidden_act"),
        ),
        qk_norm="head",
        post_norm=True,
        zero_centered=True,
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
        rope_types=("default", "linear"),
        two_ropes=True,
        windows="pattern",
        scaled="sizes",
        divided=True,
        only={
            "final_logit_softcapping": (None, "logits are not capped"),
            "attn_logit_softcapping": (None, "scores are not capped"),
            "use_bidirectional_attention": (False, "a token sees only those before it"),
        },
        without_effect=("_sliding_window_pattern",),
    ),
    "hunyuan_v1_dense": LlamaLike(
        Fields(
            required=(WIDTH,),
            defaults={GROUPS: None, "attention_bias": False, PADDING: 0},
            nullable=(GROUPS, PADDING),
        ),
        qk_norm="rotated head",
        without_effect=("eod_token_id",),
    ),
    "glm4": LlamaLike(  # GLM-4-0414 and GLM-Z1
        Fields(
            defaults={
                **{GROUPS: 2, WIDTH: 128, PADDING: 151329},
                **{"attention_bias": True, "partial_rotary_factor": 0.5},
            },
            nullable=("partial_rotary_factor", PADDING),
        ),
        qkv_bias="attention_bias",
        post_norm=True,
        norm_names=NormNames(
            before_mlp="post_attention_layernorm",
            after_attention="post_self_attn_layernorm",
            after_mlp="post_mlp_layernorm",
        ),
        fused_mlp=True,
        partial_rope=True,
        rotated_pairs=True,
    ),
}
