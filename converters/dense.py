"""Dense decoders: Llama, Qwen2 (bias on q, k, v), Qwen3 (norms on q and k)."""

from typing import Any

from converters.rules import QKV, Column, HFTensor, Replicated, Row, Rule, Vocabulary

HF_LAYER = "model.layers.{layer}."
MEGATRON_LAYER = "decoder.layers.{layer}."


def _dense(hf_config: dict[str, Any], *, qkv_bias: bool = False, qk_norm: bool = False) -> list[Rule]:
    hidden, ffn, vocabulary = (hf_config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    heads = hf_config["num_attention_heads"]
    groups = hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim") or hidden // heads
    tied = hf_config.get("tie_word_embeddings", False)
    attention, mlp = MEGATRON_LAYER + "self_attention.", MEGATRON_LAYER + "mlp."

    def hf(name: str, *shape: int) -> HFTensor:
        return HFTensor(HF_LAYER + name, shape)

    def q_k_v(kind: str, *inputs: int) -> tuple[HFTensor, ...]:
        rows = {"q": heads * head_dim, "k": groups * head_dim, "v": groups * head_dim}
        return tuple(hf(f"self_attn.{name}_proj.{kind}", out, *inputs) for name, out in rows.items())

    embedding = HFTensor("model.embed_tokens.weight", (vocabulary, hidden))
    head = HFTensor("lm_head.weight", (vocabulary, hidden))
    rules: list[Rule] = [
        Vocabulary(("embedding.word_embeddings.weight",), (embedding,)),
        Replicated(
            (MEGATRON_LAYER + "input_layernorm.weight", attention + "linear_qkv.layer_norm_weight"),
            (hf("input_layernorm.weight", hidden),),
        ),
        QKV((attention + "linear_qkv.weight",), q_k_v("weight", hidden), groups=groups),
        Row((attention + "linear_proj.weight",), (hf("self_attn.o_proj.weight", hidden, heads * head_dim),)),
        Replicated(
            (MEGATRON_LAYER + "pre_mlp_layernorm.weight", mlp + "linear_fc1.layer_norm_weight"),
            (hf("post_attention_layernorm.weight", hidden),),
        ),
        Column((mlp + "linear_fc1.weight",), (hf("mlp.gate_proj.weight", ffn, hidden), hf("mlp.up_proj.weight", ffn, hidden))),
        Row((mlp + "linear_fc2.weight",), (hf("mlp.down_proj.weight", hidden, ffn),)),
        Replicated(("decoder.final_layernorm.weight",), (HFTensor("model.norm.weight", (hidden,)),)),
        # Tied: the last stage holds a copy of the embedding, which HF has no tensor of its own for.
        Vocabulary(("output_layer.weight",), (embedding if tied else head,), exported=not tied),
    ]
    if qkv_bias:
        rules.insert(3, QKV((attention + "linear_qkv.bias",), q_k_v("bias"), groups=groups))
    if qk_norm:
        rules[3:3] = [
            Replicated((f"{attention}{name}_layernorm.weight",), (hf(f"self_attn.{name}_norm.weight", head_dim),))
            for name in "qk"
        ]
    return rules


def llama(hf_config: dict[str, Any]) -> list[Rule]:
    """Llama 2 and 3."""
    return _dense(hf_config)


def qwen2(hf_config: dict[str, Any]) -> list[Rule]:
    """Qwen2 and 2.5: always a bias on q, k and v, which config.json does not mention."""
    return _dense(hf_config, qkv_bias=True)


def qwen3(hf_config: dict[str, Any]) -> list[Rule]:
    """Qwen3: an RMSNorm over each head of q and k."""
    return _dense(hf_config, qk_norm=True)
