"""Reads the settings of rotary position embeddings (arXiv:2104.09864), with the scaling types that
Megatron-Core 0.16 supports.
"""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from rftmega.converters import default_rope_theta
from rftmega.converters.config_fields import is_number, is_whole
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.hf_config import HFConfig


@dataclass(frozen=True)
class Yarn:
    """Yarn holds the parameters of YaRN (arXiv:2309.00071), which blends interpolated and original
    frequencies.
    """

    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


@dataclass(frozen=True)
class LongRope:
    """LongRope holds the parameters of LongRoPE (arXiv:2402.13753) for rows of up to
    `original_positions` tokens. Longer rows have other divisors, which are not supported.
    """

    original_positions: int
    divisors: tuple[float, ...]  # of the frequencies (short_factor)
    attention_factor: float  # of sines and cosines


@dataclass(frozen=True)
class Rope:
    """Rope holds a model's RoPE settings; `kind` is default, linear, llama3, yarn or longrope,
    `factor` the context-extension factor.
    """

    base: float
    kind: str = "default"
    factor: float = 1.0
    yarn: Yarn | None = None
    long: LongRope | None = None
    # frequency counts of time, height and width of image positions (M-RoPE, Qwen2-VL,
    # arXiv:2409.12191); empty: one-dimensional positions
    sections: tuple[int, ...] = ()
    interleaved: bool = False  # the three alternate, instead of one after the other
    fraction: float = 1.0  # leading part of each head that is rotated
    # base in the layers with a sliding window, which have no scaling; None: as in the others
    local_base: float | None = None


def read_rope(config: HFConfig, *, partial: bool = False, ignored: tuple[str, ...] = ()) -> Rope:
    """Returns the RoPE settings of a config: `rope_parameters` of transformers 5, or `rope_theta`
    and `rope_scaling` (with `type` or `rope_type`) of transformers 4.

    `partial`: transformers' code for this architecture can rotate only a part of each head, so the
    config's rotated fraction is used. `ignored`: names of settings without effect in this
    architecture. Raises CheckpointError, naming the field, for settings that Megatron can't
    represent or transformers refuses.
    """
    fields = {name: value for name, value in _fields(config).items() if name not in ignored}
    return _read(fields, config, partial=partial)


def read_two_ropes(config: HFConfig) -> Rope:
    """Returns the RoPE settings of a model whose layers with a sliding window have others, as
    Gemma 3: `rope_parameters` with settings for each layer type, or `rope_theta`, `rope_scaling`
    and `rope_local_base_freq`.

    Raises CheckpointError as `read_rope`, and for a scaling in layers with a sliding window.
    """
    given = config.get("rope_parameters") or {}
    if unknown := set(given) - {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"rope_parameters has {sorted(unknown)[0]!r}; this family has settings for full_attention and sliding_attention."
        )
    scaling = dict(config.get("rope_scaling") or {})
    if "type" in scaling:
        raise CheckpointError(
            "rope_scaling has type, which transformers does not read in this family. Call it rope_type."
        )
    usual = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    wide, near = (  # a base of null is refused, as in transformers
        {
            "rope_type": "default",
            "rope_theta": config.get(name, None if config.said(name) else base),
        }
        for name, base in usual.items()
    )
    wide |= {**(given.get("full_attention") or {}), **scaling}
    near |= given.get("sliding_attention") or {}
    local = _read(near, config, partial=False)
    if local.kind != "default":
        raise CheckpointError(
            f"rope_type={local.kind!r} in layers with a sliding window is not supported; default is."
        )
    return replace(_read(wide, config, partial=False), local_base=local.base)


def _read(fields: dict[str, Any], config: HFConfig, *, partial: bool) -> Rope:
    """Returns the RoPE settings of `fields`, which are emptied."""
    kind = fields.pop("rope_type")
    sections: tuple[int, ...] = ()
    interleaved = False
    if "vision_config" in config:
        sections, interleaved = _sections(fields)
        kind = "default" if kind == "mrope" else kind
        if kind != "default":
            raise CheckpointError(f"rope_type={kind!r} is not supported with images; default is.")
    if kind not in ("default", "linear", "llama3", "yarn", "longrope"):
        raise CheckpointError(
            f"rope_type={kind!r} is not supported; default, linear, llama3, yarn and longrope are."
        )
    base = _number(fields, "rope_theta")
    fraction = _fraction(fields, config, kind if partial else None)
    if kind in ("llama3", "yarn", "longrope"):
        fields.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    factor, yarn, long = 1.0, None, None
    if kind == "yarn":
        factor, yarn = _yarn(fields, config)
    elif kind == "longrope":
        long = _long(fields, config)
    elif kind != "default":
        factor = _number(fields, "factor")
    if kind == "llama3":
        # Megatron hard-codes these three; another value would silently be another model.
        for name, only in (
            ("low_freq_factor", 1),
            ("high_freq_factor", 4),
            ("original_max_position_embeddings", 8192),
        ):
            if (value := fields.pop(name, None)) != only:
                raise CheckpointError(
                    f"rope {name}={value} is not supported: Megatron-Core 0.16 knows {only} only."
                )
    if fields:
        said = ", ".join(f"{name}={value}" for name, value in fields.items())
        raise CheckpointError(
            f"rope parameters of type {kind} have {said}, which is not honoured here."
        )
    return Rope(base, kind, factor, yarn, long, sections, interleaved, fraction)


def _fields(config: HFConfig) -> dict[str, Any]:
    theta = config.get("rope_theta")
    if theta is None and not config.said("rope_theta"):
        theta = default_rope_theta(config)
    newer = config.get("rope_parameters") or {}
    fields = dict(config.get("rope_scaling") or newer)  # rope_scaling takes precedence
    if any(isinstance(value, dict) for value in fields.values()):
        raise CheckpointError("rope_parameters differ between layer types, which is not supported.")
    older = fields.pop("type", "default")
    return {"rope_type": older, "rope_theta": theta} | fields


def _sections(fields: dict[str, Any]) -> tuple[tuple[int, ...], bool]:
    """Removes the M-RoPE fields from `fields`. Returns the numbers of frequencies for time, height
    and width, and whether the three are interleaved. Raises CheckpointError if the numbers are
    missing or invalid.
    """
    sections = fields.pop("mrope_section", None)
    interleaved = fields.pop("mrope_interleaved", False)
    fits = isinstance(sections, list) and len(sections) == 3
    if not fits or not all(is_whole(part, 0) for part in sections):
        raise CheckpointError(f"rope mrope_section={sections!r}: it must list three whole numbers.")
    if interleaved not in (True, False):
        raise CheckpointError(f"rope mrope_interleaved={interleaved!r}: it must be true or false.")
    return tuple(sections), bool(interleaved)


def _fraction(fields: dict[str, Any], config: HFConfig, kind: str | None) -> float:
    """Removes the fraction of a head that RoPE rotates from `fields` and returns it; `kind` is the
    RoPE type, or None if the architecture always rotates whole heads.
    """
    found = fields.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind is None and found != 1.0:
        raise CheckpointError(
            f"partial_rotary_factor={found} is not supported: the whole head is rotated."
        )
    if not is_number(found, 0) or not 0 < found <= 1:
        raise CheckpointError(
            f"partial_rotary_factor={json.dumps(found)}: it must be above 0 and at most 1."
        )
    if kind == "yarn" and found != 1.0:
        raise CheckpointError(
            f"partial_rotary_factor={found} with yarn is not supported: Megatron-Core 0.16 stretches whole heads only."
        )
    return float(found)


def _number(fields: dict[str, Any], name: str) -> float:
    """Removes the field `name`, which must be a positive number, from `fields` and returns its
    value.

    Raises CheckpointError if the field is missing, null or not a positive number.
    """
    value = fields.pop(name, None)
    if not is_number(value, 0) or value == 0:
        raise CheckpointError(
            f"rope {name}={json.dumps(value)}: it must be there and a positive number."
        )
    return float(value)


def _optional(fields: dict[str, Any], name: str, default: float) -> float:
    """Removes the field `name`, a number, from `fields` and returns its value, or `default` if the
    field is absent, null or 0, as in transformers.
    """
    if not fields.get(name):
        fields.pop(name, None)
        return default
    return _number(fields, name)


def _yarn(fields: dict[str, Any], config: HFConfig) -> tuple[float, Yarn]:
    """Removes the YaRN settings from `fields`, and returns the factor and the other settings.

    A factor of null is derived from the context lengths; an absent factor raises CheckpointError,
    as in transformers.
    """
    original = fields.pop("original_max_position_embeddings")
    if not is_whole(original, 1):
        raise CheckpointError(
            f"rope original_max_position_embeddings={json.dumps(original)}: it must be a positive whole number."
        )
    computed = "factor" in fields and fields["factor"] is None
    if computed:
        fields["factor"] = config["max_position_embeddings"] / original
    factor = _number(fields, "factor")
    truncate = fields.pop("truncate", True)
    if truncate not in (None, True, False):
        raise CheckpointError(f"rope truncate={json.dumps(truncate)}: it must be true or false.")
    yarn = Yarn(
        original_positions=original,
        beta_fast=_optional(fields, "beta_fast", 32.0),
        beta_slow=_optional(fields, "beta_slow", 1.0),
        mscale=_optional(fields, "mscale", 0.0) or None,
        mscale_all_dim=_optional(fields, "mscale_all_dim", 0.0) or None,
        truncate=bool(truncate),
    )
    if (yarn.mscale is None) != (yarn.mscale_all_dim is None):
        raise CheckpointError(
            "rope mscale and mscale_all_dim of yarn must be given both or neither."
        )
    if computed and yarn.mscale is not None and "kv_lora_rank" in config:
        raise CheckpointError(
            "rope factor=null with mscale_all_dim: this family's attention needs the factor. Write it."
        )
    attention = fields.pop("attention_factor", None)
    usual = _attention_factor(factor, yarn)
    if attention is not None and not (
        is_number(attention) and math.isclose(attention, usual, rel_tol=1e-6)
    ):
        raise CheckpointError(
            f"rope attention_factor={attention} is not supported: Megatron-Core 0.16 always takes {usual:.6g}."
        )
    return factor, yarn


def _long(fields: dict[str, Any], config: HFConfig) -> LongRope:
    """Removes the LongRoPE settings from `fields`, and returns them.

    As in transformers, `original_max_position_embeddings` of the config itself takes precedence,
    and without a factor it is derived from the context lengths. Raises CheckpointError for missing
    or invalid settings.
    """
    if "kv_lora_rank" in config:
        raise CheckpointError("rope_type='longrope' is not supported with latent attention.")
    original = fields.pop("original_max_position_embeddings")
    original = config.get("original_max_position_embeddings", original)
    if not is_whole(original, 2):
        raise CheckpointError(
            f"original_max_position_embeddings={json.dumps(original)}: longrope needs a whole number above 1."
        )
    divisors = fields.pop("short_factor", None)
    fields.pop("long_factor", None)  # of longer rows
    if not isinstance(divisors, list) or not all(is_number(n, 0) and n for n in divisors):
        raise CheckpointError(
            f"rope short_factor={json.dumps(divisors)}: longrope needs a list of positive numbers."
        )
    if fields.get("factor") is None:
        fields |= {"factor": config["max_position_embeddings"] / original}
    factor = _number(fields, "factor")
    attention = fields.pop("attention_factor", None)
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if not is_number(attention, 1):
        raise CheckpointError(
            f"rope attention_factor={json.dumps(attention)}: longrope is supported with a number of 1 at least."
        )
    return LongRope(original, tuple(map(float, divisors)), float(attention))


def _attention_factor(factor: float, yarn: Yarn) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if yarn.mscale and yarn.mscale_all_dim:
        return scale(yarn.mscale) / scale(yarn.mscale_all_dim)
    return scale(1.0)
