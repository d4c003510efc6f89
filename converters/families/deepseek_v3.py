"""DeepSeek-V3: multi-head latent attention (MLA); dense MLPs in the first layers, then MoE layers
with shared experts and a routing bias per expert.
"""

from collections.abc import Sequence, Set
from typing import Any

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import (
    ATTENTION,
    MLP,
    Config,
    decoder,
    dense_mlp,
    in_layer,
    routed_experts,
    router,
    shared_expert,
)
from rftmega.converters.rules import Column, Replicated, Row, Rule

FIELDS = Fields(
    required=(
        *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    ),
    defaults={
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "n_group": 8,
        "topk_group": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "attention_bias": False,
        "num_nextn_predict_layers": 1,
    },
    nullable=(
        "num_key_value_heads",
        "q_lora_rank",
        "attention_dropout",
        "num_nextn_predict_layers",
    ),
    not_null=("head_dim",),
)

# tensors of a multi-token prediction (MTP) layer in addition to a normal layer's
PREDICTORS = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
# copies that are not always present
PREDICTORS_TOO = ("embed_tokens.weight", "shared_head.norm.weight", "shared_head.head.weight")


def table(config: Config) -> list[Rule]:
    return decoder(config, latent_attention(config), sigmoid_moe(config))


def sigmoid_moe(config: Config) -> list[Rule]:
    """Returns the conversion rules of the MLPs: dense in the first layers; in the others an MoE
    with shared experts and a routing bias per expert.
    """
    layers = range(config["num_hidden_layers"])
    first = config["first_k_dense_replace"]
    dense, sparse = frozenset(layers[:first]), frozenset(layers[first:])
    experts, ffn = config["n_routed_experts"], config["moe_intermediate_size"]
    bias = in_layer("mlp.gate.e_score_correction_bias", experts)
    shared = config["n_shared_experts"] * ffn
    return [
        *dense_mlp(config, layers=dense),
        router(config, experts, layers=sparse),
        Replicated((MLP + "router.expert_bias",), (bias,), layers=sparse),
        *routed_experts(config, ffn, layers=sparse),
        *(shared_expert(config, shared, "mlp.shared_experts", layers=sparse) if shared else []),
    ]


def latent_attention(config: Config) -> list[Rule]:
    """Returns the conversion rules of multi-head latent attention (MLA).

    Up-projections are split by whole heads. With Transformer Engine every rank holds all of the
    down-projections, and the up-projections contain the norms.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rank, narrow = config.get("q_lora_rank"), config["kv_lora_rank"]
    plain, rope, value = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query = heads * (plain + rope)

    def column(megatron: str, hf: str, out: int, into: int) -> Rule:
        narrow = "down" in megatron
        return Column(
            (f"{ATTENTION}{megatron}.weight",),
            (in_layer(f"self_attn.{hf}.weight", out, into),),
            narrow=narrow,
        )

    def norm(kind: str, hf: str, size: int) -> Rule:
        candidates = (
            f"{ATTENTION}{kind}_layernorm.weight",
            f"{ATTENTION}linear_{kind}_up_proj.layer_norm_weight",
        )
        return Replicated(candidates, (in_layer(f"self_attn.{hf}.weight", size),))

    queries = (
        [
            column("linear_q_down_proj", "q_a_proj", rank, hidden),
            norm("q", "q_a_layernorm", rank),
            column("linear_q_up_proj", "q_b_proj", query, rank),
        ]
        if rank
        else [column("linear_q_proj", "q_proj", query, hidden)]
    )
    return [
        *queries,
        column("linear_kv_down_proj", "kv_a_proj_with_mqa", narrow + rope, hidden),
        norm("kv", "kv_a_layernorm", narrow),
        column("linear_kv_up_proj", "kv_b_proj", heads * (plain + value), narrow),
        Row(
            (ATTENTION + "linear_proj.weight",),
            (in_layer("self_attn.o_proj.weight", hidden, heads * value),),
        ),
    ]


def left_out(config: Config, names: Set[str]) -> set[str]:
    """Returns the names among `names`, all tensors of a folder, that belong to multi-token
    prediction layers: these follow the last layer and are not loaded.
    """
    return predictors(config, names, table(config))


def predictors(config: Config, names: Set[str], rules: Sequence[Rule]) -> set[str]:
    """Returns the names among `names`, all tensors of a folder, that belong to multi-token
    prediction layers, which follow the last layer; config.json states their number.

    `rules`: the model's conversion rules. A layer that lacks the tensors specific to multi-token
    prediction is not counted as such a layer: then num_hidden_layers is too small.
    """
    first, count = config["num_hidden_layers"], config["num_nextn_predict_layers"] or 0
    like_others = [tensor.name for rule in rules if rule.per_layer for tensor in rule.hf]
    found: set[str] = set()
    for layer in range(first, first + count):
        prefix = f"model.layers.{layer}."
        if all(prefix + name in names for name in PREDICTORS):
            for expert in range(config["n_routed_experts"]):
                found |= {name.format(layer=layer, expert=expert) for name in like_others}
            found |= {prefix + name for name in (*PREDICTORS, *PREDICTORS_TOO)}
    return found & names


def written(config: Config) -> dict[str, Any]:
    """Returns {field: value} to change in config.json of an exported folder, which has no
    multi-token prediction layers.

    Without the field transformers would expect one such layer.
    """
    return {"num_nextn_predict_layers": 0} if config["num_nextn_predict_layers"] != 0 else {}
