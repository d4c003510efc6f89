"""Qwen2-Audio: Qwen2 with Whisper's audio encoder and a linear projection of its output."""

from collections.abc import Iterator
from dataclasses import replace

from rftmega.converters.audio_fields import AudioFields
from rftmega.converters.decoder import Config
from rftmega.converters.llama_like import LLAMA_LIKE
from rftmega.converters.rules import Rule
from rftmega.converters.vision import Tower, audio_tower_rules, layer_norm, linear, renamed
from rftmega.core.errors import CheckpointError

FIELDS = AudioFields(
    LLAMA_LIKE["qwen2"].fields,
    text_sizes={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
)
HEAD = "lm_head.weight"


def table(config: Config) -> list[Rule]:
    tower = config["audio_config"]
    width, heads = tower["d_model"], tower["encoder_attention_heads"]
    if width % heads:
        raise CheckpointError(f"audio_config: {heads} heads can't share a width of {width}.")
    text = [
        _inside(rule)
        for rule in renamed(LLAMA_LIKE["qwen2"].table(config), "language_model.model.")
    ]
    return [*text, *audio_tower_rules(shapes(tower, config["hidden_size"]))]


def _inside(rule: Rule) -> Rule:
    """Returns the rule with the HF name "lm_head.weight" changed to
    "language_model.lm_head.weight", as in the audio-language model; other rules are unchanged.
    """
    tensors = [
        tensor._replace(name=f"language_model.{HEAD}") if tensor.name == HEAD else tensor
        for tensor in rule.hf
    ]
    return replace(rule, hf=tuple(tensors))


def shapes(tower: Tower, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names and shapes of the tensors of the audio encoder and the projection.

    `tower`: the audio encoder's config; `hidden`: the decoder's hidden size.
    """
    width, ffn = tower["d_model"], tower["encoder_ffn_dim"]
    yield "audio_tower.conv1.weight", (width, tower["num_mel_bins"], 3)
    yield "audio_tower.conv1.bias", (width,)
    yield "audio_tower.conv2.weight", (width, width, 3)
    yield "audio_tower.conv2.bias", (width,)
    yield "audio_tower.embed_positions.weight", (tower["max_source_positions"], width)
    for layer in range(tower["encoder_layers"]):
        block = f"audio_tower.layers.{layer}"
        yield f"{block}.self_attn.k_proj.weight", (width, width)
        yield from linear(f"{block}.self_attn.v_proj", width, width)
        yield from linear(f"{block}.self_attn.q_proj", width, width)
        yield from linear(f"{block}.self_attn.out_proj", width, width)
        yield from layer_norm(f"{block}.self_attn_layer_norm", width)
        yield from linear(f"{block}.fc1", ffn, width)
        yield from linear(f"{block}.fc2", width, ffn)
        yield from layer_norm(f"{block}.final_layer_norm", width)
    yield from layer_norm("audio_tower.layer_norm", width)
    yield from linear("multi_modal_projector.linear", hidden, width)
