"""How processes share a decoder by transformers' plan, and which plans are refused."""

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from rftmega.backends.decoder.tensor_plan import partial_of, splits_of, styles_of
from rftmega.core.errors import CheckpointError
from tests.tiny_decoders import DECODER, FAMILIES


def on_meta(family: str, **more: Any) -> PreTrainedModel:
    kind, fields = FAMILIES[family]
    config = getattr(transformers, kind)(**(DECODER | fields | more))
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


def test_each_element_of_a_parameter_is_in_one_share_of_each_that_is_split() -> None:
    model = on_meta("qwen3-moe")
    styles = styles_of(model, 2)
    both = [splits_of(model, styles, rank, 2) for rank in range(2)]
    for name, parameter in model.named_parameters():
        if name not in both[0]:
            continue
        dim = both[0][name].dim
        held = [
            at for each in both for start, stop in each[name].slices for at in range(start, stop)
        ]
        assert sorted(held) == list(range(parameter.shape[dim])), name
        shapes = [each[name].of(tuple(parameter.shape)) for each in both]
        assert sum(shape[dim] for shape in shapes) == parameter.shape[dim]


def test_gate_and_up_of_an_expert_are_each_shared() -> None:
    model = on_meta("qwen3-moe")  # gate is rows 0 ... 23 of an expert's, up 24 ... 47
    split = splits_of(model, styles_of(model, 2), 1, 2)["model.layers.0.mlp.experts.gate_up_proj"]
    assert (split.dim, split.slices) == (1, ((12, 24), (36, 48)))


def test_a_vocabulary_that_does_not_divide_has_a_short_last_block() -> None:
    model = on_meta("qwen3-tied")  # of 131 words
    splits = [splits_of(model, styles_of(model, 2), rank, 2) for rank in range(2)]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert [each[name].slices for each in splits] == [((0, 66),), ((66, 131),)]


def test_a_bias_behind_a_sum_and_norms_of_whole_activations_are_not_split() -> None:
    model = on_meta("llama", attention_bias=True)
    splits = splits_of(model, styles_of(model, 2), 0, 2)
    layer = "model.layers.0."
    assert splits[f"{layer}self_attn.q_proj.bias"].slices == ((0, 16),)
    assert splits[f"{layer}self_attn.o_proj.weight"].dim == 1
    assert f"{layer}self_attn.o_proj.bias" not in splits
    assert f"{layer}input_layernorm.weight" not in splits


def test_norms_of_heads_have_a_share_of_their_gradient_only() -> None:
    model = on_meta("qwen3")
    partial = partial_of(model, styles_of(model, 2))
    assert partial == {
        f"model.layers.{layer}.self_attn.{kind}_norm.weight"
        for layer in range(3)
        for kind in ("q", "k")
    }


@pytest.mark.parametrize(
    ("family", "more", "size", "said"),
    [
        ("gpt-oss", {}, 2, "no tensor-parallel plan of the layers of GptOssForCausalLM"),
        ("qwen3", {}, 4, r"does not divide the 2 heads \(num_key_value_heads\)"),
        (
            "qwen3",
            {"num_attention_heads": 6, "num_key_value_heads": 6},
            4,
            "does not divide the 6 heads",
        ),
        (
            "qwen3",
            {"intermediate_size": 49},
            2,
            r"mlp.gate_proj.weight \[49, 32\] along dimension 0",
        ),
        ("qwen3-moe", {"moe_intermediate_size": 25}, 2, r"experts.gate_up_proj \[4, 50, 32\]"),
        ("llama", {"vocab_size": 5, "pad_token_id": 0}, 4, r"embed_tokens.weight \[5, 32\]"),
    ],
)
def test_what_processes_cannot_share_is_refused_by_name(
    family: str, more: dict[str, Any], size: int, said: str
) -> None:
    even = {"num_attention_heads": 4, "num_key_value_heads": 4} if family == "llama" else {}
    with pytest.raises(CheckpointError, match=said):
        styles_of(on_meta(family, **(even | more)), size)


def test_a_norm_that_transformers_forgot_in_its_plan_is_refused() -> None:
    sizes = DECODER | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    for normed in (False, True):
        config = transformers.Glm4MoeConfig(**sizes, use_qk_norm=normed)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        if not normed:
            assert styles_of(model, 2)
            continue
        with pytest.raises(CheckpointError, match=r"says nothing of .*self_attn.q_norm.weight"):
            styles_of(model, 2)


def test_a_style_that_is_not_known_is_refused_by_name() -> None:
    config = transformers.DeepseekV2Config(
        num_hidden_layers=2, hidden_size=32, n_routed_experts=4, n_group=1, topk_group=1
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        CheckpointError, match="by 'mla_kv_a_proj', which this backend does not know"
    ):
        styles_of(model, 2)
