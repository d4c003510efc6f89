"""Defines the types of config.json's fields, and an architecture's defaults for absent or null
fields.
Both follow transformers 5.19, with which the engines read the same file; a generated test compares
every field.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rftmega.core.errors import CheckpointError

LARGEST = 2**32  # maximum of a size
MOST_LAYERS = 2**16  # also of experts: each is a line of a table
REQUIRED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("vocab_size", "rms_norm_eps", "max_position_embeddings"),
)
DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True)
class Fields:
    """Fields holds an architecture's required fields and its defaults for fields that are absent
    from config.json.

    Sizes have no defaults, unlike in transformers, whose defaults are the sizes of one published
    model: a config.json without a required field is rejected.
    """

    required: tuple[str, ...] = ()  # in addition to REQUIRED
    defaults: Mapping[str, Any] | None = None  # in addition to DEFAULTS, or instead of them
    # fields of the above that may be null, which differs from absent
    nullable: tuple[str, ...] = ()
    not_null: tuple[str, ...] = ()  # without a default, but null is refused
    without: tuple[str, ...] = ()  # those of REQUIRED that the architecture does not have
    rope_theta: float = 10000.0

    def completed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields `given`, those of config.json, with a default for each absent field.

        Raises CheckpointError with a list of fields that are missing, null or of the wrong type.
        """
        usual = (name for name in REQUIRED if name not in self.without)
        required = (*usual, *self.required)
        defaults = {**DEFAULTS, **(self.defaults or {})}
        reasons = [f"{name} is missing" for name in required if name not in given]
        for name, value in given.items():
            if value is None:
                if name in (*required, *defaults, *self.not_null) and name not in self.nullable:
                    reasons.append(f"{name} is null; leave it out, or give a value")
            elif (kind := KINDS.get(name)) and not kind.fits(value):
                reasons.append(f"{name} is {_shown(value)}, not {kind.said}")
        if reasons:
            raise CheckpointError.listing(
                f"config.json of this {given.get('model_type')} model can't be used", reasons
            )
        return {**defaults, **given}


@dataclass(frozen=True)
class Kind:
    """Kind describes the valid values of a config.json field: `said` is a text for error messages,
    `fits` returns whether a value is valid.
    """

    said: str
    fits: Callable[[Any], bool]


def is_whole(value: Any, least: int, most: int = LARGEST) -> bool:
    """Returns whether a JSON value is an integer from `least` to `most`; true and false are not
    integers.
    """
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: Any, least: float = -math.inf) -> bool:
    """Returns whether a JSON value is a finite number that is at least `least`; true and false are
    not numbers.
    """
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= least
    )


def _shown(value: Any) -> str:
    return text if len(text := repr(value)) <= 60 else text[:57] + "..."


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(fits(item) for item in value)


def _kinds() -> dict[str, Kind]:
    size = Kind("a positive whole number", lambda value: is_whole(value, 1))
    window = Kind("a whole number", lambda value: is_whole(value, 0))
    number_of = Kind("a positive whole number", lambda value: is_whole(value, 1, MOST_LAYERS))
    count = Kind("a whole number", lambda value: is_whole(value, 0, MOST_LAYERS))
    number = Kind("a number of 0 or more", lambda value: is_number(value, 0))
    factor = Kind("a number above 0", lambda value: is_number(value, 0) and value > 0)
    pattern = Kind(
        "a positive whole number or a text",
        lambda value: isinstance(value, str) or is_whole(value, 1, MOST_LAYERS),
    )
    marks = Kind("a list of 0 and 1", _is_list_of(lambda item: is_whole(item, 0, 1)))
    flag = Kind("true or false", lambda value: isinstance(value, bool))
    text = Kind("a text", lambda value: isinstance(value, str))
    texts = Kind("a list of texts", _is_list_of(lambda item: isinstance(item, str)))
    layers = Kind("a list of layers", _is_list_of(lambda item: is_whole(item, 0, MOST_LAYERS)))
    mapping = Kind("an object", lambda value: isinstance(value, dict))
    named = {
        size: "hidden_size intermediate_size vocab_size max_position_embeddings original_max_position_embeddings head_dim "
        "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
        "v_head_dim rotary_dim linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim",
        window: "sliding_window eod_token_id",
        number_of: "num_hidden_layers num_attention_heads num_key_value_heads num_experts num_local_experts num_experts_per_tok "
        "n_routed_experts n_group topk_group decoder_sparse_step no_rope_layer_interval linear_num_key_heads "
        "linear_num_value_heads full_attention_interval",
        count: "first_k_dense_replace n_shared_experts num_nextn_predict_layers max_window_layers",
        number: "rms_norm_eps initializer_range routed_scaling_factor rope_theta attention_dropout router_jitter_noise "
        "residual_dropout resid_pdrop embd_pdrop embedding_multiplier residual_multiplier attention_multiplier",
        factor: "logits_scaling swiglu_alpha swiglu_limit",
        pattern: "sliding_window_pattern",
        marks: "no_rope_layers",
        flag: "tie_word_embeddings attention_bias attention_out_bias mlp_bias qkv_bias norm_topk_prob use_sliding_window "
        "rope_interleave use_qk_norm",
        text: "hidden_act model_type scoring_func topk_method",
        texts: "layer_types architectures",
        layers: "mlp_only_layers",
        mapping: "rope_parameters rope_scaling quantization_config",
    }
    return {name: kind for kind, names in named.items() for name in names.split()}


KINDS = _kinds()
