"""Decoders: Llama, Qwen2 (bias on q, k, v), Qwen3 (norms on q and k), dense or with a mixture of experts."""

from typing import Any

from converters.rules import QKV, Column, HFTensor, Replicated, Row, Rule, Vocabulary
from rftmega.errors import CheckpointError

HF_LAYER = "model.layers.{layer}."
MEGATRON_LAYER = "decoder.layers.{layer}."


def _decoder(hf_config: dict[str, Any], mlp: list[Rule], *, qkv_bias: bool = False, qk_norm: bool = False) -> list[Rule]:
    """Everything but the layers' MLP, which the caller gives, in the order of the model."""
    hidden, vocabulary, heads = (hf_config[name] for name in ("hidden_size", "vocab_size", "num_attention_heads"))
    groups = hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim") or hidden // heads
    tied = hf_config.get("tie_word_embeddings", False)
    attention = MEGATRON_LAYER + "self_attention."

    def q_k_v(kind: str, *inputs: int) -> tuple[HFTensor, ...]:
        rows = {"q": heads * head_dim, "k": groups * head_dim, "v": groups * head_dim}
        return tuple(_hf(f"self_attn.{name}_proj.{kind}", out, *inputs) for name, out in rows.items())

    embedding = HFTensor("model.embed_tokens.weight", (vocabulary, hidden))
    head = HFTensor("lm_head.weight", (vocabulary, hidden))
    bias = [QKV((attention + "linear_qkv.bias",), q_k_v("bias"), groups=groups)] if qkv_bias else []
    norms = [
        Replicated((f"{attention}{name}_layernorm.weight",), (_hf(f"self_attn.{name}_norm.weight", head_dim),))
        for name in ("qk" if qk_norm else "")
    ]
    return [
        Vocabulary(("embedding.word_embeddings.weight",), (embedding,)),
        Replicated(
            (MEGATRON_LAYER + "input_layernorm.weight", attention + "linear_qkv.layer_norm_weight"),
            (_hf("input_layernorm.weight", hidden),),
        ),
        QKV((attention + "linear_qkv.weight",), q_k_v("weight", hidden), groups=groups),
        *bias,
        *norms,
        Row((attention + "linear_proj.weight",), (_hf("self_attn.o_proj.weight", hidden, heads * head_dim),)),
        Replicated(
            (MEGATRON_LAYER + "pre_mlp_layernorm.weight", MEGATRON_LAYER + "mlp.linear_fc1.layer_norm_weight"),
            (_hf("post_attention_layernorm.weight", hidden),),
        ),
        *mlp,
        Replicated(("decoder.final_layernorm.weight",), (HFTensor("model.norm.weight", (hidden,)),)),
        # Tied: the last stage holds a copy of the embedding, which HF has no tensor of its own for.
        Vocabulary(("output_layer.weight",), (embedding if tied else head,), exported=not tied),
    ]


def _hf(name: str, *shape: int) -> HFTensor:
    return HFTensor(HF_LAYER + name, shape)


def _gated(hf_config: dict[str, Any], ffn: int, hf: str, fc1: tuple[str, ...], fc2: tuple[str, ...], **where: Any) -> list[Rule]:
    """Gate, up and down projections named `hf`, in Megatron's fc1 (gate above up) and fc2."""
    hidden = hf_config["hidden_size"]
    gate_up = tuple(_hf(f"{hf}.{name}_proj.weight", ffn, hidden) for name in ("gate", "up"))
    return [Column(fc1, gate_up, **where), Row(fc2, (_hf(f"{hf}.down_proj.weight", hidden, ffn),), **where)]


def _dense_mlp(hf_config: dict[str, Any], **where: Any) -> list[Rule]:
    fc1, fc2 = ((f"{MEGATRON_LAYER}mlp.linear_{name}.weight",) for name in ("fc1", "fc2"))
    return _gated(hf_config, hf_config["intermediate_size"], "mlp", fc1, fc2, **where)


def sparse_layers(hf_config: dict[str, Any]) -> frozenset[int]:
    """Layers with experts in Qwen's mixtures; the others are dense."""
    step, dense = hf_config.get("decoder_sparse_step", 1), hf_config.get("mlp_only_layers") or []
    return frozenset(n for n in range(hf_config["num_hidden_layers"]) if n not in dense and (n + 1) % step == 0)


def experts_of(hf_config: dict[str, Any]) -> int:
    """Experts a layer: transformers 5 calls the number num_local_experts, 4 called it num_experts."""
    for name in ("num_experts", "num_local_experts"):
        if hf_config.get(name):
            return hf_config[name]
    raise CheckpointError("config.json has neither num_experts nor num_local_experts.")


def llama(hf_config: dict[str, Any]) -> list[Rule]:
    """Llama 2 and 3."""
    return _decoder(hf_config, _dense_mlp(hf_config))


def qwen2(hf_config: dict[str, Any]) -> list[Rule]:
    """Qwen2 and 2.5: always a bias on q, k and v, which config.json does not mention."""
    return _decoder(hf_config, _dense_mlp(hf_config), qkv_bias=True)


def qwen3(hf_config: dict[str, Any]) -> list[Rule]:
    """Qwen3: an RMSNorm over each head of q and k."""
    return _decoder(hf_config, _dense_mlp(hf_config), qk_norm=True)


def qwen3_moe(hf_config: dict[str, Any]) -> list[Rule]:
    """Qwen3 with a mixture of experts in some or all layers."""
    sparse = sparse_layers(hf_config)
    layers = frozenset(range(hf_config["num_hidden_layers"]))
    mlp = MEGATRON_LAYER + "mlp."
    router = Replicated(
        (mlp + "router.weight",), (_hf("mlp.gate.weight", experts_of(hf_config), hf_config["hidden_size"]),), layers=sparse
    )
    fc1, fc2 = (  # one module an expert; Transformer Engine's grouped one numbers its weights
        (f"{mlp}experts.local_experts.{{expert}}.linear_{name}.weight", f"{mlp}experts.linear_{name}.weight{{expert}}")
        for name in ("fc1", "fc2")
    )
    experts = _gated(hf_config, hf_config["moe_intermediate_size"], "mlp.experts.{expert}", fc1, fc2, layers=sparse)
    return _decoder(hf_config, [*_dense_mlp(hf_config, layers=layers - sparse), router, *experts], qk_norm=True)


def value_head(hf_config: dict[str, Any]) -> list[Rule]:
    """One number a token, named as in transformers' sequence (no bias) and token classifiers; a policy's folder has none."""
    hidden = hf_config["hidden_size"]
    return [
        Replicated(("value_head.weight",), (HFTensor("score.weight", (1, hidden)),), optional=True),
        Replicated(("value_head.bias",), (HFTensor("score.bias", (1,)),), optional=True),
    ]
