"""Qwen3.5: its text model with Qwen3-VL's vision encoder, whose features enter the decoder once."""

from rftmega.converters import delta_net
from rftmega.converters.decoder import Config
from rftmega.converters.families import qwen3_5_text, qwen3_vl
from rftmega.converters.nested_fields import VisionFields
from rftmega.converters.rules import Rule
from rftmega.converters.vision import check, renamed, tower_rules

TEXT = "model.language_model."
FIELDS = VisionFields(
    delta_net.FIELDS,
    required=tuple(name for name in qwen3_vl.FIELDS.required if name != "deepstack_visual_indexes"),
    defaults=qwen3_vl.FIELDS.defaults,
    only={**qwen3_vl.FIELDS.only, "deepstack_visual_indexes": []},
)
left_out = delta_net.left_out
written = delta_net.written


def table(config: Config) -> list[Rule]:
    return with_tower(qwen3_5_text.table(config), config)


def with_tower(text: list[Rule], config: Config) -> list[Rule]:
    """Returns the conversion rules of a decoder, `text`, and of its vision encoder."""
    tower = config["vision_config"]
    check(tower, tower["hidden_size"], tower["out_hidden_size"], config["hidden_size"])
    return [*renamed(text, TEXT), *tower_rules(qwen3_vl.shapes(tower), "model.visual.")]
