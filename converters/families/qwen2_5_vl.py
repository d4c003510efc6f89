"""Qwen2.5-VL: Qwen2 with a vision encoder that has window attention, gated MLPs and RMSNorm."""

from collections.abc import Iterator

from rftmega.converters.decoder import Config
from rftmega.converters.families import qwen2_vl
from rftmega.converters.llama_like import LLAMA_LIKE
from rftmega.converters.nested_fields import VisionFields
from rftmega.converters.rules import Rule
from rftmega.converters.vision import Tower, check, linear, patches, tower_rules

FIELDS = VisionFields(
    qwen2_vl.TEXT,
    required=(
        *("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size"),
        *("patch_size", "window_size", "fullatt_block_indexes"),
    ),
    defaults={
        "in_channels": 3,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 4,
        "initializer_range": 0.02,
    },
    only={"hidden_act": "silu"},
)


def table(config: Config) -> list[Rule]:
    tower = config["vision_config"]
    check(tower, tower["hidden_size"], tower["out_hidden_size"], config["hidden_size"])
    return [*LLAMA_LIKE["qwen2"].table(config), *tower_rules(shapes(tower), "visual.")]


def shapes(tower: Tower) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, ffn = tower["hidden_size"], tower["intermediate_size"]
    merged = width * tower["spatial_merge_size"] ** 2
    yield "patch_embed.proj.weight", patches(tower, width)
    for layer in range(tower["depth"]):
        block = f"blocks.{layer}"
        yield f"{block}.norm1.weight", (width,)
        yield f"{block}.norm2.weight", (width,)
        yield from linear(f"{block}.attn.qkv", 3 * width, width)
        yield from linear(f"{block}.attn.proj", width, width)
        yield from linear(f"{block}.mlp.gate_proj", ffn, width)
        yield from linear(f"{block}.mlp.up_proj", ffn, width)
        yield from linear(f"{block}.mlp.down_proj", width, ffn)
    yield "merger.ln_q.weight", (width,)
    yield from linear("merger.mlp.0", merged, merged)
    yield from linear("merger.mlp.2", tower["out_hidden_size"], merged)
