"""Reads the fields of config.json of audio-language models, which has sections for decoder and
audio encoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rftmega.converters.config_fields import LARGEST, MOST_LAYERS, Fields, is_number, is_whole
from rftmega.converters.dropout_fields import drops
from rftmega.converters.nested_fields import NEUTRAL, flattened
from rftmega.core.errors import CheckpointError

# fields of audio_config without effect on results, in addition to NEUTRAL
ALSO_NEUTRAL = frozenset({"init_std", "use_cache", "is_decoder", "tie_word_embeddings"})
REQUIRED = (
    *("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    *("num_mel_bins", "max_source_positions"),
)
ONLY: Mapping[str, Any] = {
    "activation_function": "gelu",
    "scale_embedding": False,
}
# names that transformers treats as synonyms
ALIASES = {
    "num_hidden_layers": "encoder_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}


@dataclass(frozen=True)
class AudioFields:
    """AudioFields holds an audio-language architecture's defaults for fields that are absent from
    config.json.
    """

    text: Fields
    # transformers' defaults for fields of text_config, which the original folder lacks
    text_sizes: Mapping[str, int]

    @property
    def rope_theta(self) -> float:
        return self.text.rope_theta

    def completed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the decoder's fields and "audio_config" in one dict, both with defaults for
        absent fields.

        `given`: the parsed config.json. Raises CheckpointError with a list of fields that are
        missing, of the wrong type or unsupported.
        """
        flat = self.text.completed({**self.text_sizes, **flattened(given)})
        token = flat.get("audio_token_index", flat.get("audio_token_id"))
        if not is_whole(token, 0):
            raise CheckpointError(
                "config.json names no audio_token_index, which stands for a waveform."
            )
        if flat.get("audio_token_id", token) != token:
            raise CheckpointError(
                f"config.json says audio_token_index={token} and audio_token_id={flat['audio_token_id']}. Leave one of them out."
            )
        return flat | {
            "audio_token_index": token,
            "audio_config": _tower(flat.get("audio_config")),
        }


def _tower(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise CheckpointError("config.json of this model has no audio_config.")
    fields = {name: value for name, value in given.items() if name not in ALIASES}
    reasons = []
    for name, meant in ALIASES.items():
        if name in given and given[name] != fields.setdefault(meant, given[name]):
            reasons.append(f"{name}={given[name]!r} is not {meant}={fields[meant]!r}")
    reasons += [f"{name} is missing" for name in REQUIRED if fields.get(name) is None]
    known = {*REQUIRED, *ONLY, *NEUTRAL, *ALSO_NEUTRAL, "initializer_range"}
    for name, value in fields.items():
        if name not in known and not drops(name):
            reasons.append(f"{name}={value!r} is not honoured here")
        elif value is not None and (said := _wrong(name, value)):
            reasons.append(f"{name} is {value!r}, not {said}")
    for name, value in ONLY.items():
        if (found := fields.get(name, value)) != value:
            reasons.append(f"{name}={found!r} is not supported, only {value!r}")
    if reasons:
        raise CheckpointError.listing("audio_config of config.json can't be used", reasons)
    own = {name: fields[name] for name in (*REQUIRED, "initializer_range") if name in fields}
    return {"initializer_range": 0.02, **ONLY, **own}


def _wrong(name: str, value: Any) -> str:
    """Returns a description of valid values, such as "a positive whole number", if `value` is
    invalid for the field `name` of audio_config; "" if it is valid.
    """
    if name in REQUIRED:
        most = MOST_LAYERS if name == "encoder_layers" else LARGEST
        return "" if is_whole(value, 1, most) else "a positive whole number"
    if name == "initializer_range":
        return "" if is_number(value, 0) else "a number of 0 or more"
    return ""
