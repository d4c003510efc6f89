"""Describes the models of LLAMA_LIKE, architectures with few differences from Llama."""

from dataclasses import replace
from typing import Any

from rftmega.converters.llama_like import LlamaLike
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import (
    ModelDescription,
    Scales,
    decoder,
    everywhere,
    qwen_windows,
    with_windows,
)
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig, kind: LlamaLike) -> ModelDescription:
    """Returns the description of the model of a config.json whose architecture is `kind`.

    Raises CheckpointError, naming the field, for a setting that is not supported.
    """
    for name, (value, why) in kind.only.items():
        config.only(name, value, why=why)
    for name in kind.without_effect:
        config.get(name)
    if kind.divided:
        _refuse_odd_heads(config)
    model = decoder(
        config,
        qkv_bias=kind.has_qkv_bias(config),
        qk_norm=bool(kind.qk_norm),
        partial_rope=kind.partial_rope,
        activation=kind.activation,
        activation_field=kind.activation_field,
        two_ropes=kind.two_ropes,
    )
    if kind.rope_types and model.rope.kind not in kind.rope_types:
        raise CheckpointError(
            f"rope_type={model.rope.kind!r} is not supported in this family; {', '.join(kind.rope_types)} is."
        )
    model = replace(
        model,
        full_width_qk_norm=kind.qk_norm == "all heads",
        rotated_qk_norm=kind.qk_norm == "rotated head",
        pre_norm=kind.pre_norm,
        post_norm=kind.post_norm,
        zero_centered=kind.zero_centered,
        gated=kind.gated,
        rotated_pairs=kind.rotated_pairs,
        scales=_scales(config, kind),
    )
    if kind.unrotated == "no_rope_layers":
        model = replace(model, unrotated=_without_rope(config, model.layers))
    model = _windowed(model, config, kind)
    if kind.unrotated == "full_attention" and config.get("sliding_window"):
        full = frozenset(range(model.layers)) - model.windowed
        model = replace(model, unrotated=full)
    return model


def _refuse_odd_heads(config: HFConfig) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise CheckpointError(
            f"hidden_size={hidden} is no multiple of num_attention_heads={heads}, which transformers wants here."
        )


def _windowed(model: ModelDescription, config: HFConfig, kind: LlamaLike) -> ModelDescription:
    if kind.windows == "all":
        return everywhere(model, config)
    if kind.windows == "late":
        return qwen_windows(model, config)
    if kind.windows == "unrotated":
        used = config["use_sliding_window"]
        return with_windows(model, config, used=used, listed=lambda n: n in model.unrotated)
    if kind.windows == "pattern":
        every: Any = config.get("sliding_window_pattern")
        by_number = isinstance(every, int) and config.get("sliding_window") is not None
        if "layer_types" not in config and not by_number:
            raise CheckpointError(
                "config.json has no layer_types. Without it, transformers wants a sliding_window and, as sliding_window_pattern, "
                f"a number; it has {config.get('sliding_window')} and {every!r}."
            )
        return with_windows(model, config, used=True, listed=lambda n: (n + 1) % every != 0)
    return model


def _without_rope(config: HFConfig, layers: int) -> frozenset[int]:
    """Returns the layers without rotary embeddings: those whose entry of `no_rope_layers` is 0, by
    default each `no_rope_layer_interval`-th.
    """
    every = config["no_rope_layer_interval"]
    given = config.get("no_rope_layers", [int((n + 1) % every != 0) for n in range(layers)])
    if len(given) != layers:
        raise CheckpointError(
            f"no_rope_layers lists {len(given)} layers; num_hidden_layers is {layers}."
        )
    return frozenset(n for n, rotated in enumerate(given) if not rotated)


def _scales(config: HFConfig, kind: LlamaLike) -> Scales:
    if kind.scaled == "fields":
        return Scales(
            embedding=config["embedding_multiplier"],
            residual=config["residual_multiplier"],
            attention=config["attention_multiplier"],
            logits=1.0 / config["logits_scaling"],
        )
    if kind.scaled == "sizes":
        return Scales(
            embedding=config["hidden_size"] ** 0.5,
            rounded_embedding=True,
            attention=config["query_pre_attn_scalar"] ** -0.5,
        )
    return Scales()
