"""Qwen2-VL: Qwen2 with a vision encoder of plain transformer layers."""

from collections.abc import Iterator

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import Config
from rftmega.converters.llama_like import LLAMA_LIKE
from rftmega.converters.nested_fields import VisionFields
from rftmega.converters.rules import Rule
from rftmega.converters.vision import Tower, check, layer_norm, linear, patches, tower_rules

TEXT = Fields(
    required=("num_key_value_heads",),
    defaults={"use_sliding_window": False, "sliding_window": None, "max_window_layers": 80},
    nullable=("sliding_window",),
    not_null=("head_dim",),
    rope_theta=1000000.0,
)
FIELDS = VisionFields(
    TEXT,
    required=("depth", "embed_dim", "hidden_size", "num_heads", "patch_size"),
    defaults={
        "in_channels": 3,
        "mlp_ratio": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.02,
    },
    only={"hidden_act": "quick_gelu"},
)


def table(config: Config) -> list[Rule]:
    tower = config["vision_config"]
    check(tower, tower["embed_dim"], tower["hidden_size"], config["hidden_size"])
    return [*LLAMA_LIKE["qwen2"].table(config), *tower_rules(shapes(tower), "visual.")]


def shapes(tower: Tower) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, out = tower["embed_dim"], tower["hidden_size"]
    ffn, merged = width * tower["mlp_ratio"], width * tower["spatial_merge_size"] ** 2
    yield "patch_embed.proj.weight", patches(tower, width)
    for layer in range(tower["depth"]):
        block = f"blocks.{layer}"
        yield from layer_norm(f"{block}.norm1", width)
        yield from layer_norm(f"{block}.norm2", width)
        yield from linear(f"{block}.attn.qkv", 3 * width, width)
        yield from linear(f"{block}.attn.proj", width, width)
        yield from linear(f"{block}.mlp.fc1", ffn, width)
        yield from linear(f"{block}.mlp.fc2", width, ffn)
    yield from layer_norm("merger.ln_q", width)
    yield from linear("merger.mlp.0", merged, merged)
    yield from linear("merger.mlp.2", out, merged)
