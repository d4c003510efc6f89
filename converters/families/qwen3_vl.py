"""Qwen3-VL: Qwen3 with a vision encoder, some of whose layers also feed the decoder's first layers
(DeepStack).
"""

from collections.abc import Iterator

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import Config
from rftmega.converters.llama_like import LLAMA_LIKE
from rftmega.converters.nested_fields import VisionFields
from rftmega.converters.rules import Rule
from rftmega.converters.vision import (
    Tower,
    check,
    layer_norm,
    linear,
    patches,
    renamed,
    tower_rules,
)

FIELDS = VisionFields(
    Fields(
        required=("num_key_value_heads", "head_dim"),
        defaults={"attention_bias": False},
        rope_theta=500000.0,
    ),
    required=(
        *("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size"),
        *("patch_size", "num_position_embeddings", "deepstack_visual_indexes"),
    ),
    defaults={
        "in_channels": 3,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.02,
    },
    only={"hidden_act": "gelu_pytorch_tanh"},
)


def table(config: Config) -> list[Rule]:
    tower = config["vision_config"]
    check(tower, tower["hidden_size"], tower["out_hidden_size"], config["hidden_size"])
    text = renamed(LLAMA_LIKE["qwen3"].table(config), "model.language_model.")
    return [*text, *tower_rules(shapes(tower), "model.visual.")]


def shapes(tower: Tower) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, ffn = tower["hidden_size"], tower["intermediate_size"]
    yield "patch_embed.proj.weight", patches(tower, width)
    yield "patch_embed.proj.bias", (width,)
    yield "pos_embed.weight", (tower["num_position_embeddings"], width)
    for layer in range(tower["depth"]):
        block = f"blocks.{layer}"
        yield from layer_norm(f"{block}.norm1", width)
        yield from layer_norm(f"{block}.norm2", width)
        yield from linear(f"{block}.attn.qkv", 3 * width, width)
        yield from linear(f"{block}.attn.proj", width, width)
        yield from linear(f"{block}.mlp.linear_fc1", ffn, width)
        yield from linear(f"{block}.mlp.linear_fc2", width, ffn)
    yield from _merger(tower, "merger", width)
    for place in range(len(tower.get("deepstack_visual_indexes", ()))):
        merged = width * tower["spatial_merge_size"] ** 2
        yield from _merger(tower, f"deepstack_merger_list.{place}", merged)


def _merger(tower: Tower, name: str, normed: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    merged = tower["hidden_size"] * tower["spatial_merge_size"] ** 2
    yield from layer_norm(f"{name}.norm", normed)
    yield from linear(f"{name}.linear_fc1", merged, merged)
    yield from linear(f"{name}.linear_fc2", tower["out_hidden_size"], merged)
