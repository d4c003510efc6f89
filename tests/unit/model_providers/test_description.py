from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3NextConfig

from rftmega.config import ParallelConfig
from rftmega.converters.delta_net import linear_layers
from rftmega.model_providers.description import describe, layout_violations, stage_layers
from rftmega.model_providers.hf_config import read_hf_config
from tests.tiny_models import VARIANTS, save_tiny

P = ParallelConfig


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_the_number_of_parameters_is_transformers(variant: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, variant)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert describe(read_hf_config(folder)).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_the_token_whose_embedding_learns_nothing_is_that_of_transformers_class(
    variant: str, tmp_path: Path
) -> None:
    saved = read_hf_config(save_tiny(tmp_path, variant, pad_token_id=None)) | {"vocab_size": 160000}
    absent = {name: value for name, value in saved.items() if name != "pad_token_id"}
    for fields in (absent, *(saved | {"pad_token_id": token} for token in (None, 7, -1))):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
        assert describe(fields).padding == model.get_input_embeddings().padding_idx, fields


def test_interleaved_chunks_take_turns_over_the_stages() -> None:
    found = stage_layers(8, P(pipeline=2, virtual_pipeline=2))
    assert found == [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]


def test_the_first_and_last_stage_may_be_shorter() -> None:
    assert stage_layers(10, P(pipeline=4, first_stage_layers=2, last_stage_layers=2)) == [
        [range(0, 2)],
        [range(2, 5)],
        [range(5, 8)],
        [range(8, 10)],
    ]


@pytest.mark.parametrize(
    ("variant", "parallel", "complaint"),
    [
        ("qwen3", P(tensor=3), "parallel.tensor=3 does not divide the model's number of attention heads, 4; the nearest that"),
        ("qwen3", P(tensor=64), "parallel.tensor=64 does not divide the model's intermediate_size 96; the nearest that"),
        ("qwen3", P(pipeline=3), "parallel.pipeline=3 does not divide the model's 4 layers evenly. The nearest that does is 2"),
        ("qwen3", P(pipeline=8), "parallel.pipeline=8 does not divide the model's 4 layers evenly. The nearest that does is 4"),
        ("qwen3", P(pipeline=2, virtual_pipeline=3), "virtual_pipeline=3 does not divide the 2 layers of a stage; the nearest"),
        ("qwen3", P(pipeline=2, first_stage_layers=1, last_stage_layers=1), "must hold the model's 4 layers"),
        ("qwen3", P(pipeline=3, first_stage_layers=1), "between the first (1) and the last (even)"),
        ("qwen3", P(expert=2), "parallel.expert=2: this model has no experts. Set it to 1."),
        ("qwen3-moe", P(expert=3), "parallel.expert=3 does not divide the model's number of experts, 4; the nearest that"),
        ("qwen3-moe", P(expert_tensor=5), "parallel.expert_tensor=5 does not divide the model's moe_intermediate_size 48;"),
        ("gpt-oss", P(expert_tensor=2), "parallel.expert_tensor=2: this model's experts have biases"),
        ("qwen3.5", P(tensor=8), "parallel.tensor=8 does not divide the model's linear_num_key_heads 4; the nearest"),
        ("qwen3.5", P(tensor=2, context=4), "parallel.context=4 does not divide the model's linear_num_key_heads of a "
                                            "tensor-parallel process, 2; the nearest that does is 2."),
        ("qwen3-moe", P(tensor=2), "parallel.tensor=2 with experts needs parallel.sequence=true"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_be_split_into_is_refused_with_the_nearest(
    variant: str, parallel: ParallelConfig, complaint: str, tmp_path: Path
) -> None:
    found = layout_violations(describe(read_hf_config(save_tiny(tmp_path, variant))), parallel)
    assert any(complaint in reason for reason in found), found


@pytest.mark.parametrize("every", [None, 2, 3])
def test_without_layer_types_each_nth_layer_has_attention(every: int | None) -> None:
    given = {} if every is None else {"full_attention_interval": every}
    kinds = Qwen3NextConfig(num_hidden_layers=7, **given).layer_types
    linear = linear_layers({"num_hidden_layers": 7, **given})
    assert [n in linear for n in range(7)] == [kind == "linear_attention" for kind in kinds]
