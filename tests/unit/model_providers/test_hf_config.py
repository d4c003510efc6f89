"""What config.json says is honoured or refused, never overlooked."""

import json
from pathlib import Path
from typing import Any

import pytest

from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import FAMILIES, MISSING, describe
from rftmega.model_providers.hf_config import read_hf_config
from tests.tiny_models import LLAMA3_ROPE, save_tiny

OLD_LLAMA: dict[str, Any] = {  # as transformers 4 wrote it
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0",
    "use_cache": True,
    "vocab_size": 131,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 700.0,
    "short_factor": [1.5] * 8,
    "long_factor": [2.0] * 8,
}
OLD_SCALING = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}
OLD_QWEN3_MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                 "head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1], "max_window_layers": 4,
                 "use_sliding_window": False, "sliding_window": None, "attention_bias": False}  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "old"),
    [
        ("llama", OLD_LLAMA),
        ("llama-linear-rope", OLD_LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        (
            "llama-tied-llama3-rope",
            OLD_LLAMA
            | {"tie_word_embeddings": True, "rope_theta": 500000.0, "rope_scaling": OLD_SCALING},
        ),
        ("qwen3-moe", OLD_LLAMA | OLD_QWEN3_MOE),
    ],
)
def test_both_generations_of_config_give_the_same_model(
    variant: str, old: dict[str, Any], tmp_path: Path
) -> None:
    assert describe(old) == describe(read_hf_config(save_tiny(tmp_path, variant)))


@pytest.mark.parametrize(
    ("variant", "change", "complaint"),
    [
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0, which is not honoured"),
        ("llama", {"some_new_switch": False, "auto_map": {"AutoConfig": "a.B"}}, "some_new_switch=false"),
        ("llama", {"attention_bias": True}, "attention_bias=true is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias=true is not supported"),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported'),
        ("llama", {"sliding_window": 16}, "sliding_window=16, which is not honoured"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantised weights"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "short_factor=null"),
        ("phi4-mini", {"rope_parameters": LONG | {"short_factor": [1.0, 2.0]}}, "lists 2 numbers; heads of 16 need 8"),
        ("phi4-mini", {"rope_parameters": LONG | {"attention_factor": 0.5}}, "attention_factor=0.5"),
        ("phi4-mini", {"original_max_position_embeddings": None}, "original_max_position_embeddings is null"),
        ("deepseek-v3", {"rope_parameters": LONG}, "not supported with latent attention"),
        ("llama", {"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 8.0}}, "high_freq_factor=8.0 is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "short": [1]}}, "short=[1], which is not"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layer types"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama-yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0}}, "factor=2.0"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"] * 2}, "'linear_attention'"),
        ("deepseek-v3", {"scoring_func": "softmax"}, 'scoring_func="softmax"'),
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob=false"),
        ("deepseek-v3", {"num_experts_per_tok": 2}, "scores a group by its best"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave=false"),
    ],
)  # fmt: skip
def test_what_would_be_another_model_is_refused_by_name(
    variant: str, change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    hf_config = json.loads((save_tiny(tmp_path, variant) / "config.json").read_text())
    describe(hf_config)
    with pytest.raises(CheckpointError) as refusal:
        describe(hf_config | change)
    assert complaint in str(refusal.value)


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("llama", {"attention_dropout": 0.1}),
        ("seed-oss", {"attention_dropout": 0.3, "residual_dropout": 0.0}),
        ("phi3", {"resid_pdrop": 0.1, "embd_pdrop": 0.2}),
        ("mixtral", {"router_jitter_noise": 0.1}),
    ],
)
def test_what_a_model_dropped_when_it_was_made_changes_nothing(
    variant: str, change: dict[str, Any], tmp_path: Path
) -> None:
    hf_config = json.loads((save_tiny(tmp_path, variant) / "config.json").read_text())
    assert describe(hf_config | change) == describe(hf_config)


@pytest.mark.parametrize(
    ("family", "hint"),
    [
        ("gemma2", "backend=fsdp accepts this config.json: set it"),
        ("phi", "backend=fsdp accepts this config.json: set it"),
        ("gpt_bigcode", "backend=fsdp accepts this config.json: set it"),
        (
            "t5",
            "backend=fsdp can't train it either: transformers has no language model of model_type=t5",
        ),
        ("typo", "has no model_type=typo"),
        (None, "config.json has no model_type"),
    ],
)
def test_a_family_that_is_not_there_is_refused_with_those_that_are(
    family: str | None, hint: str
) -> None:
    with pytest.raises(CheckpointError, match=f"these are: {', '.join(FAMILIES)}. .*{hint}"):
        describe({"model_type": family})


def test_mistral_has_a_window_unless_config_json_says_that_it_has_none(tmp_path: Path) -> None:
    hf_config = json.loads((save_tiny(tmp_path, "mistral-window") / "config.json").read_text())
    assert describe(hf_config).window == 8
    assert describe(hf_config | {"sliding_window": None}).window is None
    del hf_config["sliding_window"]
    assert describe(hf_config).window == 4096


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x89PNG\r\n\x1a\n", r"config\.json:1: not UTF-8 \(byte 0x89\)"),
        (b"[1, 2]", r"config\.json holds a list, not an object"),
        (b'{"model_type": "llama",\n "model_type": "qwen2"}', r"config\.json:2: the key 'model_type' is there twice"),
        (b'{"model_type": ["llama"]}', r"model_type=\['llama'\] is not supported"),
        (b'{"model_type": "llama", "hidden_size": "128", "num_attention_heads": 0, "vocab_size": true, "rms_norm_eps": "x"}',
         r"(?s)intermediate_size is missing.*hidden_size is '128', not a positive whole number.*num_attention_heads is 0.*"
         r"vocab_size is True.*rms_norm_eps is 'x', not a number"),
    ],
)  # fmt: skip
def test_a_config_that_is_none_is_refused_with_all_that_is_wrong(
    content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        describe(read_hf_config(tmp_path))


def test_a_config_that_is_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(
        CheckpointError, match=r"config\.json can't be read: Too many levels of symbolic links"
    ):
        read_hf_config(tmp_path)


def test_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(OLD_LLAMA).encode())
    assert describe(read_hf_config(tmp_path)) == describe(OLD_LLAMA)


@pytest.mark.parametrize(("model_type", "missing"), sorted(MISSING.items()))
def test_an_architecture_that_is_missing_a_feature_of_megatron_is_refused_with_its_name(
    model_type: str, missing: str
) -> None:
    assert model_type not in FAMILIES
    with pytest.raises(CheckpointError) as raised:
        describe({"model_type": model_type})
    assert f"Megatron-Core 0.16 has no {missing}" in str(raised.value)
    assert "backend=fsdp" in str(raised.value)
