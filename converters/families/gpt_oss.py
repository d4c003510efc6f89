"""gpt-oss: MoE in every layer, biases in all linear layers, and attention sinks.

A folder stacks the experts of a layer: weights transposed, gate and up in turn along out. Published
folders have the weights in MXFP4.
"""

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import (
    ATTENTION,
    HF_LAYER,
    MLP,
    Config,
    decoder,
    grouped_attention,
    in_layer,
    number_of_experts,
    routed_experts,
    router,
)
from rftmega.converters.rules import Column, Replicated, Rule
from rftmega.converters.stacks import Stack

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
FIELDS = Fields(
    required=("num_experts_per_tok",),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_parameters": ROPE,
    },
    nullable=("sliding_window",),
    not_null=("num_experts", "num_local_experts"),
    rope_theta=150000.0,
)


def table(config: Config) -> list[Rule]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    attention = [
        *grouped_attention(config, qkv_bias=True),
        Replicated((ATTENTION + "linear_proj.bias",), (in_layer("self_attn.o_proj.bias", hidden),)),
        Column(
            (ATTENTION + "core_attention.softmax_offset",), (in_layer("self_attn.sinks", heads),)
        ),
    ]
    experts = number_of_experts(config)
    mlp = [
        router(config, experts, "mlp.router.weight"),
        Replicated((MLP + "router.bias",), (in_layer("mlp.router.bias", experts),)),
        *routed_experts(config, config["intermediate_size"]),
        *expert_biases(hidden, config["intermediate_size"]),
    ]
    return decoder(config, attention, mlp)


def expert_biases(hidden: int, ffn: int) -> list[Rule]:
    """Returns the conversion rules of the biases of routed experts. Like a weight in
    `routed_experts`, each bias has two possible Megatron names.
    """
    fc1, fc2 = (
        (
            f"{MLP}experts.local_experts.{{expert}}.linear_{name}.bias",
            f"{MLP}experts.linear_{name}.bias{{expert}}",
        )
        for name in ("fc1", "fc2")
    )
    gate, up, down = (
        in_layer(f"mlp.experts.{{expert}}.{name}_proj.bias", size)
        for name, size in (("gate", ffn), ("up", ffn), ("down", hidden))
    )
    return [Column(fc1, (gate, up)), Replicated(fc2, (down,))]


def stacks(config: Config) -> list[Stack]:
    """Returns descriptions of the folder's stacked tensors: weights and biases of all experts of a
    layer.
    """
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    found = []
    for layer in range(config["num_hidden_layers"]):
        stem = HF_LAYER.format(layer=layer) + "mlp.experts"
        for names, folder_name, out, inputs in (
            (("gate_proj", "up_proj"), "gate_up_proj", ffn, hidden),
            (("down_proj",), "down_proj", hidden, ffn),
        ):
            for kind, suffix, shape in (
                ("weight", "", (out, inputs)),
                ("bias", "_bias", (out,)),
            ):
                matrices = tuple(
                    tuple(f"{stem}.{expert}.{name}.{kind}" for name in names)
                    for expert in range(number_of_experts(config))
                )
                found.append(
                    Stack(
                        f"{stem}.{folder_name}{suffix}",
                        matrices,
                        shape,
                        alternating=True,
                        always_transposed=True,
                    )
                )
    return found
