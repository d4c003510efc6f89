"""Conversion rules that the architectures' tables share: attention, MLP, experts, norms, embedding
and heads.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rftmega.converters.rules import (
    QKV,
    Column,
    GatedQKV,
    HFTensor,
    Replicated,
    Row,
    Rule,
    Vocabulary,
)
from rftmega.core.errors import CheckpointError

Config = Mapping[str, Any]  # config.json

HF_LAYER = "model.layers.{layer}."
MEGATRON_LAYER = "decoder.layers.{layer}."


ATTENTION = MEGATRON_LAYER + "self_attention."
MLP = MEGATRON_LAYER + "mlp."


class NormNames(NamedTuple):
    """NormNames holds the names of a layer's norms in a folder, of those that the architecture
    has; by default those of Gemma, or without norms behind attention and MLP those of Llama.
    """

    before_mlp: str = ""
    after_attention: str = "post_attention_layernorm"
    after_mlp: str = "post_feedforward_layernorm"


USUAL_NAMES = NormNames()


def decoder(
    config: Config,
    attention: list[Rule],
    mlp: list[Rule],
    *,
    pre_norm: bool = True,
    post_norm: bool = False,
    names: NormNames = USUAL_NAMES,
) -> list[Rule]:
    """Returns the conversion rules of a whole decoder in order: embedding, norms, attention, MLP,
    final norm and LM head.

    `attention`, `mlp`: the rules of these parts, which differ by architecture. `pre_norm`,
    `post_norm`: norms precede, and follow, attention and MLP; `names`: in the folder.
    """
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    tied = config["tie_word_embeddings"]
    embedding = HFTensor("model.embed_tokens.weight", (vocabulary, hidden))
    head = HFTensor("lm_head.weight", (vocabulary, hidden))
    # Transformer Engine stores a norm in the linear layer after it, unless several layers
    # follow.
    before = [
        Replicated(
            (MEGATRON_LAYER + "input_layernorm.weight", ATTENTION + "linear_qkv.layer_norm_weight"),
            (in_layer("input_layernorm.weight", hidden),),
        )
    ]
    usual = "pre_feedforward_layernorm" if post_norm else "post_attention_layernorm"
    before_mlp = names.before_mlp or usual
    between = [
        Replicated(
            (MEGATRON_LAYER + "pre_mlp_layernorm.weight", MLP + "linear_fc1.layer_norm_weight"),
            (in_layer(f"{before_mlp}.weight", hidden),),
        )
    ]
    behind_attention, behind = (
        [Replicated((f"{module}.post_layernorm.weight",), (in_layer(f"{name}.weight", hidden),))]
        for module, name in (
            (ATTENTION + "linear_proj", names.after_attention),
            (MLP + "linear_fc2", names.after_mlp),
        )
    )
    return [
        Vocabulary(("embedding.word_embeddings.weight",), (embedding,)),
        *(before if pre_norm else []),
        *attention,
        *(behind_attention if post_norm else []),
        *(between if pre_norm else []),
        *mlp,
        *(behind if post_norm else []),
        Replicated(
            ("decoder.final_layernorm.weight",), (HFTensor("model.norm.weight", (hidden,)),)
        ),
        # Tied: the last stage holds a copy of the embedding, for which HF has no separate tensor.
        Vocabulary(("output_layer.weight",), (embedding if tied else head,), exported=not tied),
    ]


def in_layer(name: str, *shape: int) -> HFTensor:
    """Returns the description of an HF tensor that each decoder layer has.

    `name`: its name within the layer, such as "mlp.gate.weight"; `shape`: its dimensions.
    """
    return HFTensor(HF_LAYER + name, shape)


def grouped_attention(
    config: Config,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    rotated_qk_norm: bool = False,
    full_width_qk_norm: bool = False,
    fused: bool = False,
    output_gate: bool = False,
) -> list[Rule]:
    """Returns the conversion rules of grouped-query attention.

    `qkv_bias`: q, k and v have biases. `qk_norm`: q and k are normalised in each head;
    `rotated_qk_norm`: after rotary embeddings; `full_width_qk_norm`: over all heads together.
    `fused`: the folder stores q, k and v in one tensor. `output_gate`: a gate of each head's output
    is computed with its query.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads

    queries = heads * width * (2 if output_gate else 1)
    rows = {"q": queries, "k": groups * width, "v": groups * width}
    parts = tuple(rows.values()) if fused else ()

    def q_k_v(kind: str, *inputs: int) -> tuple[HFTensor, ...]:
        held = {"qkv": sum(rows.values())} if fused else rows
        return tuple(
            in_layer(f"self_attn.{name}_proj.{kind}", out, *inputs) for name, out in held.items()
        )

    bias = [QKV((ATTENTION + "linear_qkv.bias",), q_k_v("bias"), groups=groups)] if qkv_bias else []
    norms = [
        Replicated(
            (f"{ATTENTION}{name}_layernorm.weight",),
            (
                in_layer(
                    f"self_attn.{name}_norm.weight", rows[name] if full_width_qk_norm else width
                ),
            ),
        )
        for name in ("qk" if qk_norm or full_width_qk_norm else "")
    ]
    norms += [
        Replicated(
            (f"{ATTENTION}core_attention.{name[0]}_layernorm.weight",),
            (in_layer(f"self_attn.{name}_layernorm.weight", width),),
        )
        for name in (("query", "key") if rotated_qk_norm else ())
    ]
    name = (ATTENTION + "linear_qkv.weight",)
    weight = (
        GatedQKV(name, q_k_v("weight", hidden), groups=groups, heads=heads)
        if output_gate
        else QKV(name, q_k_v("weight", hidden), groups=groups, fused=parts)
    )
    return [
        weight,
        *bias,
        *norms,
        Row(
            (ATTENTION + "linear_proj.weight",),
            (in_layer("self_attn.o_proj.weight", hidden, heads * width),),
        ),
    ]


def gated_mlp(
    hidden: int,
    ffn: int,
    hf: str,
    fc1: tuple[str, ...],
    fc2: tuple[str, ...],
    *,
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    gated: bool = True,
    **where: Any,
) -> list[Rule]:
    """Returns the two conversion rules of a gated MLP: of gate and up, which Megatron fuses, and of
    down. Without `gated` the first is of up alone.

    `ffn`: intermediate size. `hf`: template of the HF names, in which {projection} is replaced by
    each of `projections`: gate, up and down; or gate and up as one tensor, and down. `fc1`, `fc2`:
    the possible Megatron names of the two weights. `where`: fields of Rule, such as `layers`.
    """
    *above, down = (hf.replace("{projection}", name) for name in projections)
    fused = (ffn, ffn) if len(above) == 1 and gated else ()
    rows = sum(fused) or ffn
    gate_up = tuple(in_layer(name, rows, hidden) for name in above)
    return [
        Column(fc1, gate_up, fused=fused, **where),
        Row(fc2, (in_layer(down, hidden, ffn),), **where),
    ]


def dense_mlp(config: Config, **where: Any) -> list[Rule]:
    """Returns the conversion rules of a dense gated MLP.

    `where`: fields of Rule; `layers` restricts the rules to the layers with these indices.
    """
    fc1, fc2 = ((f"{MLP}linear_{name}.weight",) for name in ("fc1", "fc2"))
    return gated_mlp(
        config["hidden_size"],
        config["intermediate_size"],
        "mlp.{projection}.weight",
        fc1,
        fc2,
        **where,
    )


def router(config: Config, experts: int, hf: str = "mlp.gate.weight", **where: Any) -> Rule:
    return Replicated(
        (MLP + "router.weight",), (in_layer(hf, experts, config["hidden_size"]),), **where
    )


def routed_experts(
    config: Config, ffn: int, hf: str = "mlp.experts.{expert}.{projection}.weight", **where: Any
) -> list[Rule]:
    """Returns the conversion rules of an MoE layer's routed experts, with two possible Megatron
    names for each weight.

    `ffn`: intermediate size of an expert; `hf`: template of the HF names; `where`: further
    arguments of `gated_mlp`. Megatron's own experts are one module per expert; Transformer Engine's
    grouped module numbers its weights.
    """
    fc1, fc2 = (
        (
            f"{MLP}experts.local_experts.{{expert}}.linear_{name}.weight",
            f"{MLP}experts.linear_{name}.weight{{expert}}",
        )
        for name in ("fc1", "fc2")
    )
    return gated_mlp(config["hidden_size"], ffn, hf, fc1, fc2, **where)


def shared_expert(config: Config, ffn: int, hf: str, **where: Any) -> list[Rule]:
    """Returns the conversion rules of an MoE layer's shared expert, which is sharded over
    tensor-parallel ranks like a dense MLP, unlike routed experts.

    `ffn`: its intermediate size; `hf`: its HF module, such as "mlp.shared_experts"; `where`: fields
    of Rule.
    """
    fc1, fc2 = ((f"{MLP}shared_experts.linear_{name}.weight",) for name in ("fc1", "fc2"))
    return gated_mlp(config["hidden_size"], ffn, hf + ".{projection}.weight", fc1, fc2, **where)


def qwen_sparse_layers(config: Config) -> frozenset[int]:
    """Returns the indices of the MoE layers in Qwen's MoE models; the other layers have a dense
    MLP.
    """
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    return frozenset(
        n for n in range(config["num_hidden_layers"]) if n not in dense and (n + 1) % step == 0
    )


def number_of_experts(config: Config) -> int:
    """Returns the number of experts: the field num_local_experts (transformers 5) or num_experts
    (transformers 4).
    Raises CheckpointError if neither is present, or if both are and differ.
    """
    one, other = config.get("num_experts"), config.get("num_local_experts")
    if one and other and one != other:
        raise CheckpointError(
            f"config.json says num_experts={one} and num_local_experts={other}. Leave the wrong one out."
        )
    if number := one or other:
        return number
    raise CheckpointError("config.json has neither num_experts nor num_local_experts.")


def value_head(config: Config) -> list[Rule]:
    """Returns the conversion rules of a value head, whose HF names are those of transformers'
    sequence classifiers (without bias) and token classifiers.

    They are optional, since the folder of a policy has no value head.
    """
    hidden = config["hidden_size"]
    return [
        Replicated(("value_head.weight",), (HFTensor("score.weight", (1, hidden)),), optional=True),
        Replicated(("value_head.bias",), (HFTensor("score.bias", (1,)),), optional=True),
    ]


def is_of_value_head(rule: Rule) -> bool:
    return rule.megatron[0].startswith("value_head.")
