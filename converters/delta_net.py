"""Conversion rules of models in which most layers have a gated delta net (linear attention) instead
of attention: Qwen3-Next and Qwen3.5.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import ATTENTION, Config, grouped_attention, in_layer
from rftmega.converters.rules import Column, HFTensor, Replicated, Row, Rule, Segment
from rftmega.core.errors import CheckpointError

FULL, LINEAR = "full_attention", "linear_attention"  # values of layer_types
PREDICTORS = "mtp_num_hidden_layers"
SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "layer_types": None,
    "partial_rotary_factor": 0.25,
}
FIELDS = Fields(
    required=SIZES, defaults=DEFAULTS, nullable=("layer_types", "partial_rotary_factor")
)


def linear_layers(config: Config) -> frozenset[int]:
    """Returns the indices of the layers with a gated delta net: those that `layer_types` lists, or
    without it all but each n-th, where n is `full_attention_interval`, by default 4.

    Raises CheckpointError for other kinds of layers, or a list of another length.
    """
    layers = config["num_hidden_layers"]
    every = config.get("full_attention_interval") or 4
    default = [LINEAR if (layer + 1) % every else FULL for layer in range(layers)]
    kinds = config.get("layer_types") or default
    if unknown := set(kinds) - {FULL, LINEAR}:
        raise CheckpointError(
            f"layer_types has {sorted(unknown)[0]!r}; {FULL} and {LINEAR} are supported."
        )
    if len(kinds) != layers:
        raise CheckpointError(
            f"layer_types lists {len(kinds)} layers; num_hidden_layers is {layers}."
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR)


def mixed_attention(config: Config, *, grouped_by_head: bool = False) -> list[Rule]:
    """Returns the conversion rules of gated delta nets, and of the other layers' attention with a
    gated output.

    `grouped_by_head`: see `delta_net`.
    """
    linear = linear_layers(config)
    full = frozenset(range(config["num_hidden_layers"])) - linear
    attention = grouped_attention(config, qk_norm=True, output_gate=True)
    return [
        *(
            replace(rule, layers=linear)
            for rule in delta_net(config, grouped_by_head=grouped_by_head)
        ),
        *(replace(rule, layers=full) for rule in attention),
    ]


def left_out(config: Config, names: Iterable[str]) -> set[str]:
    """Returns the names among `names`, all tensors of a folder, that belong to multi-token
    prediction layers, which are not loaded.
    """
    return {name for name in names if name.startswith("mtp.")}


def written(config: Config) -> dict[str, int]:
    """Returns {field: value} to change in config.json of an exported folder, which has no
    multi-token prediction layers.
    """
    return {PREDICTORS: 0} if config.get(PREDICTORS) else {}


def delta_net(config: Config, *, grouped_by_head: bool) -> list[Rule]:
    """Returns the conversion rules of a gated delta net.

    `grouped_by_head`: the folder has two input projections, whose rows are grouped by key head (see
    `GroupedByHead`), instead of one for queries, keys and values, and three others.
    """
    hidden, kernel = config["hidden_size"], config["linear_conv_kernel_dim"]
    heads, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value = heads * config["linear_key_head_dim"], values * config["linear_value_head_dim"]
    name = ATTENTION + "in_proj.weight"
    if grouped_by_head:
        projection: Rule = GroupedByHead(
            (name,),
            (
                in_layer("linear_attn.in_proj_qkvz.weight", 2 * key + 2 * value, hidden),
                in_layer("linear_attn.in_proj_ba.weight", 2 * values, hidden),
            ),
            heads=heads,
            kinds=((key, key, value, value), (values, values)),
        )
    else:
        held: list[HFTensor] = [
            in_layer(f"linear_attn.in_proj_{kind}.weight", rows, hidden)
            for kind, rows in (("qkv", 2 * key + value), ("z", value), ("b", values), ("a", values))
        ]
        projection = Column((name,), tuple(held), fused=(key, key, value))
    return [
        projection,
        Column(
            (ATTENTION + "conv1d.weight",),
            (in_layer("linear_attn.conv1d.weight", 2 * key + value, 1, kernel),),
            fused=(key, key, value),
        ),
        *(
            Column((ATTENTION + each,), (in_layer(f"linear_attn.{each}", values),))
            for each in ("dt_bias", "A_log")
        ),
        Replicated(
            (ATTENTION + "out_norm.weight",),
            (in_layer("linear_attn.norm.weight", config["linear_value_head_dim"]),),
        ),
        Row(
            (ATTENTION + "out_proj.weight",),
            (in_layer("linear_attn.out_proj.weight", hidden, value),),
        ),
    ]


@dataclass(frozen=True)
class GroupedByHead(Column):
    """GroupedByHead is the rule of an input projection whose HF tensors have, for each key head in
    turn, the rows of several kinds: query, key, values and gates; then of two numbers.

    Megatron's tensor has the rows of one kind after those of another, each in the order of heads.
    `kinds`: for each HF tensor, the rows of each of its kinds, of all heads together.
    """

    heads: int = field(kw_only=True)
    kinds: tuple[Sequence[int], ...] = field(kw_only=True)

    def cut(self, rank: int, ranks: int) -> list[Segment]:
        first = self._block(0, rank, ranks)  # refuses what can't be split
        begin, end = (self.heads * edge // self.sizes[0] for edge in first[1:])
        found = []
        for part, kinds in enumerate(self.kinds):
            step = sum(kinds) // self.heads
            offset = 0
            for kind in kinds:
                rows = kind // self.heads
                starts = [head * step + offset for head in range(begin, end)]
                found += [Segment(part, start, start + rows) for start in starts]
                offset += rows
        return found
