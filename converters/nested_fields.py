"""Reads the fields of config.json of vision-language models, which has sections for decoder and
vision encoder.
transformers 5 writes `text_config` and `vision_config`; transformers 4 wrote the decoder's fields
of Qwen2-VL and Qwen2.5-VL at the top level, next to `vision_config`. Both forms are converted to
the second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rftmega.converters.config_fields import LARGEST, MOST_LAYERS, Fields, is_number, is_whole
from rftmega.converters.dropout_fields import drops
from rftmega.core.errors import CheckpointError

# fields of vision_config without effect on results, or derived from other fields
NEUTRAL = frozenset(
    {
        *("architectures", "dtype", "model_type", "torch_dtype", "transformers_version"),
        *("chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id", "problem_type"),
        *("output_attentions", "output_hidden_states", "return_dict", "_name_or_path"),
        *("_attn_implementation", "_attn_implementation_autoset", "spatial_patch_size"),
    }
)
# fields of text_config that config.json repeats for the whole model
REPEATED = ("model_type", "dtype", "torch_dtype", "architectures", "transformers_version")
OLDER = {"in_chans": "in_channels"}  # names of transformers 4
SIZES = (
    *("embed_dim", "hidden_size", "intermediate_size", "out_hidden_size", "num_heads", "depth"),
    *("in_channels", "patch_size", "spatial_merge_size", "temporal_patch_size", "window_size"),
    *("mlp_ratio", "num_position_embeddings", "tokens_per_second"),
)
LISTS = ("fullatt_block_indexes", "deepstack_visual_indexes")


def flattened(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns config.json with the fields of its section `text_config` moved to the top level;
    unchanged if it has no `text_config`.

    Raises CheckpointError for a field with different values in the two places.
    """
    text = hf_config.get("text_config")
    if text is None:
        return hf_config
    if not isinstance(text, dict):
        raise CheckpointError("text_config of config.json is no object.")
    inner = {name: value for name, value in text.items() if name not in REPEATED}
    outer = {name: value for name, value in hf_config.items() if name != "text_config"}
    for name in sorted(inner.keys() & outer.keys()):
        if inner[name] != outer[name] and None not in (inner[name], outer[name]):
            raise CheckpointError(
                f"config.json says {name}={outer[name]!r} and in its text_config {inner[name]!r}. Leave one of them out."
            )
    return inner | {name: value for name, value in outer.items() if value is not None}


@dataclass(frozen=True)
class VisionFields:
    """VisionFields holds a vision-language architecture's required fields and its defaults for
    fields that are absent from config.json.
    """

    text: Fields
    required: tuple[str, ...]  # of vision_config
    defaults: Mapping[str, Any]  # of vision_config
    only: Mapping[str, Any] = field(default_factory=dict)  # the only supported values

    @property
    def rope_theta(self) -> float:
        return self.text.rope_theta

    def completed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the decoder's fields and "vision_config" in one dict, both with defaults for
        absent fields.

        `given`: the parsed config.json. Raises CheckpointError with a list of fields that are
        missing, of the wrong type or unsupported.
        """
        flat = self.text.completed(flattened(given))
        if not is_whole(flat.get("image_token_id"), 0):
            raise CheckpointError("config.json names no image_token_id, which stands for an image.")
        return flat | {"vision_config": self._tower(flat.get("vision_config"))}

    def _tower(self, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise CheckpointError("config.json of this model has no vision_config.")
        fields = {str(OLDER.get(name, name)): value for name, value in given.items()}
        reasons = [f"{name} is missing" for name in self.required if fields.get(name) is None]
        known = {*self.required, *self.defaults, *self.only, *NEUTRAL, "rope_parameters"}
        for name, value in fields.items():
            if name not in known and not drops(name):
                reasons.append(f"{name}={value!r} is not honoured here")
            elif value is not None and (said := _wrong(name, value)):
                reasons.append(f"{name} is {value!r}, not {said}")
        for name, value in self.only.items():
            if (found := fields.get(name, value)) != value:
                reasons.append(f"{name}={found!r} is not supported, only {value!r}")
        rope = fields.get("rope_parameters") or {}
        if rope not in ({}, {"rope_type": "axial", "rope_theta": 10000.0}):
            reasons.append(f"rope_parameters={rope!r} is not supported, only a base of 10000")
        if reasons:
            raise CheckpointError.listing("vision_config of config.json can't be used", reasons)
        own = {name: fields[name] for name in known - NEUTRAL if fields.get(name) is not None}
        return {**self.defaults, **self.only, **own}


def _wrong(name: str, value: Any) -> str:
    """Returns a description of valid values, such as "a positive whole number", if `value` is
    invalid for the field `name` of vision_config; "" if it is valid.
    """
    if name in SIZES:
        most = MOST_LAYERS if name == "depth" else LARGEST
        return "" if is_whole(value, 1, most) else "a positive whole number"
    if name in LISTS:
        fits = isinstance(value, list) and all(is_whole(item, 0, MOST_LAYERS) for item in value)
        return "" if fits else "a list of layers"
    if name == "initializer_range":
        return "" if is_number(value, 0) else "a number of 0 or more"
    return ""
