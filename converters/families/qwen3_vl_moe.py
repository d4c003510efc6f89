"""Qwen3-VL MoE: Qwen3 MoE with Qwen3-VL's vision encoder.

A folder stores the matrices of all experts of a layer in two stacked tensors.
"""

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import Config, number_of_experts, qwen_sparse_layers
from rftmega.converters.families import qwen3_moe, qwen3_vl
from rftmega.converters.nested_fields import VisionFields
from rftmega.converters.rules import Rule
from rftmega.converters.stacks import Stack
from rftmega.converters.vision import check, renamed, tower_rules
from rftmega.core.errors import CheckpointError

TEXT = "model.language_model."
FIELDS = VisionFields(
    Fields(
        required=("num_key_value_heads", "num_experts_per_tok", "moe_intermediate_size"),
        defaults={
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "norm_topk_prob": True,
        },
        nullable=("mlp_only_layers",),
        not_null=("num_experts", "num_local_experts"),
        rope_theta=500000.0,
    ),
    required=qwen3_vl.FIELDS.required,
    defaults=qwen3_vl.FIELDS.defaults,
    only=qwen3_vl.FIELDS.only,
)


def table(config: Config) -> list[Rule]:
    tower = config["vision_config"]
    check(tower, tower["hidden_size"], tower["out_hidden_size"], config["hidden_size"])
    refuse_ambiguous(config["hidden_size"], config["moe_intermediate_size"])
    text = renamed(qwen3_moe.table(config), TEXT)
    return [*text, *tower_rules(qwen3_vl.shapes(tower), "model.visual.")]


def refuse_ambiguous(hidden: int, ffn: int) -> None:
    """Raises CheckpointError if an expert's matrices have the same shape as their transposes, so
    that the two layouts of a folder (see `converters.stacks`) can't be distinguished.

    `hidden`: hidden size; `ffn`: intermediate size of an expert.
    """
    if hidden in (ffn, 2 * ffn):
        raise CheckpointError(
            f"hidden_size={hidden} with moe_intermediate_size={ffn}: nobody can tell whether a folder's experts are transposed."
        )


def stacks(config: Config) -> list[Stack]:
    """Returns descriptions of the folder's stacked tensors, each of which contains one weight (gate
    and up, or down) of all experts of a layer.
    """
    hidden, ffn = config["hidden_size"], config["moe_intermediate_size"]
    found = []
    for layer in sorted(qwen_sparse_layers(config)):
        stem = f"{TEXT}layers.{layer}.mlp.experts"
        experts = [f"{stem}.{expert}" for expert in range(number_of_experts(config))]
        gate_up = [(f"{each}.gate_proj.weight", f"{each}.up_proj.weight") for each in experts]
        down = [(f"{each}.down_proj.weight",) for each in experts]
        found.append(Stack(f"{stem}.gate_up_proj", tuple(gate_up), (ffn, hidden)))
        found.append(Stack(f"{stem}.down_proj", tuple(down), (hidden, ffn)))
    return found
