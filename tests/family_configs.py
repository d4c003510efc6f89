"""Tiny configs of every causal language model that transformers registers, for the sweep of
tests/families.py.

A config is made of the class's own defaults: each size becomes small, by its name (`sizes`), and all
else stays. Types whose sizes depend on each other in another way have their own fields (`own_fields`).
"""

import re
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY = 131
LAYERS = 4
LAYERS_OF = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "decoder_layers")
HEADS, KEY_VALUE_HEADS, HEAD = 4, 2, 8


def sizes(head: int) -> tuple[tuple[str, int], ...]:
    """Pattern of a whole name -> value; the first one counts. `head`: elements of a head."""
    return (
    (r"vocab_size|n_words|.*_vocab_size|vocab_size_.*", VOCABULARY),
    (r"hidden_size|hidden_size_global|d_model|n_embd|dim|emb_dim|embed_dim|embedding_size|word_embed_proj_dim", HEADS * head),
    (r"num_hidden_layers|n_layers?|num_layers|num_decoder_layers|decoder_layers|encoder_layers", LAYERS),
    (r"num_attention_heads|n_heads?|num_heads|.*coder_attention_heads|attention_heads", HEADS),
    (r"num_key_value_heads|n_head_kv|num_kv_heads|num_attention_groups", KEY_VALUE_HEADS),
    (r"head_dim|attention_head_dim|d_kv|kv_channels|global_head_dim", head),
    (r"intermediate_size|ffn_dim|ffn_hidden_size|d_ff|.*coder_ffn_dim|d_inner|n_inner", 48),
    (r"intermediate_dim|dense_intermediate_size", 48),
    (r"moe_intermediate_size|shared_.*intermediate_size|expert_ffn_hidden_size|ffn_hidden_size_for_.*", 24),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts", 4),
    (r"num_experts_per_tok|num_experts_per_token|moe_k|moe_topk|experts_per_token|top_k_experts", 2),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"first_k_dense_replace|moe_layer_start_index|num_dense_layers", 1),
    (r"n_group|topk_group", 1),
    (r"kv_lora_rank|q_lora_rank|.*_lora_rank|qk_nope_head_dim|qk_rope_head_dim|v_head_dim", head),
    (r"rotary_dim", 4),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length|context_length", 128),
    (r"sliding_window|attention_window_size|window_size|local_attention|attention_chunk_size|sliding_window_size", 6),
    (r"state_size|mamba_d_state|ssm_state_size|d_state", 8),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", head),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"mamba_n_groups|n_groups|mamba_ngroups", 2),
    (r"mamba_chunk_size|chunk_size", 4),
    (r"mamba_d_ssm|mamba_intermediate", 64),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"linear_key_head_dim|linear_value_head_dim", head),
    (r"index_n_heads|index_head_dim", head),
    (r"index_topk", 8),
    (r"nemo_conv_channels|ext_pw_out_channel|depthwise_separable_out_channel", HEADS * head),
)  # fmt: skip


DERIVED = (  # fields that a config computes from others; a value made for the defaults is wrong
    *("attention_layers", "full_attn_idxs", "qk_head_dim", "hybrid_layer_ids", "per_layer_config"),
    *("no_rope_layers", "moe_layers"),
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def own_fields(head: int) -> dict[str, dict[str, Any]]:
    """Model type -> fields of its own. `head`: elements of a head."""
    hidden = HEADS * head
    return {
        "glm4_moe": {"head_dim": head},  # as in published configs; vLLM reads it
        "bloom": {"hidden_size": hidden, "n_head": HEADS},
        "falcon": {"ffn_hidden_size": 4 * hidden},  # as vLLM computes it
        "blt": {"encoder_hash_byte_group_vocab": 50},
        "dbrx": {
            "attn_config": {"kv_n_heads": KEY_VALUE_HEADS, "rope_theta": 10000.0, "clip_qkv": 0.1},
            "ffn_config": {
                **{
                    "hidden_size": hidden,
                    "ffn_hidden_size": 48,
                    "moe_num_experts": 4,
                    "moe_top_k": 2,
                },
            },
        },
        "xmod": {"default_language": "en_XX"},
        "bamba": {"attn_layer_indices": [1, 3]},
        "deepseek_v2": {"num_experts_per_tok": 2},
        "emu3": {"text_config": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}},
        "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
        "reformer": {
            "is_decoder": True,
            "axial_pos_embds_dim": (hidden // 2, hidden // 2),
            "axial_pos_shape": (8, 16),
        },
        "ctrl": {"dff": 48},
        "cpmant": {"dim_ff": 48, "position_bias_num_buckets": 8, "position_bias_max_distance": 16},
        "deepseek_v4": {"o_lora_rank": head},
        "cohere_compass_text": {
            "rope_parameters": {
                "full_attention": ROPE | {"mrope_section": [head // 8, head // 8, head // 4]}
            }
        },
        "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        "gemma3n_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": head},
        # two layers: behind four, float32 is further from float64 than the bounds in transformers itself
        "gemma4_text": {
            **{"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
            **{
                "per_layer_config": {"1": {"head_dim": 2 * head}},
                "hidden_size_per_layer_input": head,
            },
        },
        "xlstm": {"num_blocks": 2},
        "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
        "hunyuan_v1_dense": {"head_dim": head},
        "hunyuan_v1_moe": {"head_dim": head},
        "inkling_text": {
            **{"rel_extent": 16, "swa_num_attention_heads": HEADS, "swa_head_dim": head},
            "swa_num_key_value_heads": KEY_VALUE_HEADS,
        },
        "kimi_linear": {
            "model_max_length": 128,
            "linear_head_dim": head,
            "linear_num_heads": HEADS,
        },
        "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        "longcat_flash": {"zero_expert_num": 2},
        "mamba2": {"num_heads": 8},
        "ministral": {"head_dim": head},
        "nemotron": {"num_key_value_heads": KEY_VALUE_HEADS, "head_dim": head},
        "qwen4_exp_text": {
            **{"indexer_n_heads": HEADS, "indexer_kv_heads": 1, "indexer_head_dim": head},
            **{"indexer_budget": 8, "indexer_compress_ratio": 2, "hc_lowrank": head},
            **{"ple_embed_dim": hidden, "ngram_vocab_size_base": 200, "split_ngram_parts": 4},
        },
        "rwkv": {"rescale_every": 1},
        "youtu": {"pad_token_id": None},  # transformers sets that row to 0 when it loads a model
        "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
        "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    }


def tiny_config(model_type: str, head: int = HEAD) -> PreTrainedConfig:
    """A config of this type with about 100,000 parameters, and with the class's own defaults
    besides sizes. `head`: elements of a head of attention.
    """
    kind: Any = CONFIG_MAPPING[model_type]
    fields = kind().to_dict()
    small = shrunk(fields, head)
    given = {name: value for name, value in small.items() if value != fields[name]}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config: PreTrainedConfig = kind(**(tokens | given | own_fields(head).get(model_type, {})))
    return config


def shrunk(fields: dict[str, Any], head: int = HEAD) -> dict[str, Any]:
    """The fields of a config with small sizes, without those that follow from others."""
    layers = next((fields[name] for name in LAYERS_OF if isinstance(fields.get(name), int)), 0)
    found = {}
    for name, value in fields.items():
        if name in DERIVED:
            continue
        if isinstance(value, list) and layers and len(value) == layers:
            value = [_small(name, each, head) for each in of_some_layers(value)]
        found[name] = _small(name, value, head)
    if "kv_lora_rank" in fields:  # latent attention has keys and values of each head
        found["num_key_value_heads"] = HEADS
    return found


def of_some_layers(values: list[Any]) -> list[Any]:
    """LAYERS of a list with a value a layer, among them each distinct value once, if they fit."""
    distinct = [value for place, value in enumerate(values) if value not in values[:place]]
    return [distinct[place % len(distinct)] for place in range(min(LAYERS, len(values)))]


def _small(name: str, value: Any, head: int) -> Any:
    """The value of a size; the same value of any other field. Configs inside become small, too."""
    if isinstance(value, dict) and name.endswith("_config"):
        return shrunk(value, head)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, size in sizes(head):
        if re.fullmatch(pattern, name):
            return min(value, size) if value > 0 else value
    return value
