"""The model that Megatron computes is the model that transformers computes, under every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rftmega.config import ParallelConfig
from tests.block_scales import plain_folder, quantise_folder
from tests.layouts import build_manager, packed_logits
from tests.ranks import run_ranks
from tests.tiny_models import VARIANTS, YARN, save_tiny, transformers_logits

LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {  # processes, layout
    "tp4": (4, ParallelConfig(tensor=4)),  # fewer key-value heads (2) than ranks
    "tp2-pp2-sp": (4, ParallelConfig(tensor=2, pipeline=2, sequence=True)),
}
MORE_LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "tp1": (1, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor=2)),
    "tp2-pp2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "pp2-vpp2": (2, ParallelConfig(pipeline=2, virtual_pipeline=2)),
    "pp2-first1": (2, ParallelConfig(pipeline=2, first_stage_layers=1)),
    "cp2": (2, ParallelConfig(context=2)),
    "tp2-cp2-sp": (4, ParallelConfig(tensor=2, context=2, sequence=True)),
}
EXPERT_LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "ep2": (2, ParallelConfig(expert=2)),
    "tp2-ep2-sp": (2, ParallelConfig(tensor=2, expert=2, sequence=True)),
    "tp2-etp2-pp2-sp": (4, ParallelConfig(tensor=2, expert_tensor=2, pipeline=2, sequence=True)),
    "pp2-ep2": (4, ParallelConfig(pipeline=2, expert=2)),
}
ROWS = [
    [5, 9, 130, 2, 77],
    [3, 0],
    [int(x) for x in torch.arange(40) * 37 % 131],
    [1, 2, 3, 4, 5, 6],
]


def logits_body(world, folder, parallel):
    manager = build_manager(folder, parallel)
    logits = packed_logits(manager, ROWS)
    dist.barrier()
    return logits


def assert_equal_to_transformers(
    variant: str, layouts: dict[str, tuple[int, ParallelConfig]], folder: Path, **changes: Any
) -> None:
    save_tiny(folder, variant, **changes)
    assert_equal(variant, layouts, folder, folder)


def assert_equal(
    variant: str, layouts: dict[str, tuple[int, ParallelConfig]], folder: Path, known: Path
) -> None:
    """`known` is a folder that transformers reads."""
    wanted = torch.cat([logits[:-1] for logits in transformers_logits(known, ROWS)])
    for name, (processes, parallel) in layouts.items():
        found = [x for x in run_ranks(processes, logits_body, folder, parallel) if x is not None]
        assert found, name
        for logits in found:
            assert (logits - wanted).abs().max() < 1e-5, (
                variant,
                name,
                (logits - wanted).abs().max(),
            )


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    assert_equal_to_transformers(variant, LAYOUTS, tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_equal_those_of_transformers_under_the_other_layouts(
    variant: str, tmp_path: Path
) -> None:
    has_experts = "moe" in variant or variant.startswith(("mixtral", "deepseek"))
    assert_equal_to_transformers(
        variant, MORE_LAYOUTS | (EXPERT_LAYOUTS if has_experts else {}), tmp_path
    )


@pytest.mark.parametrize("variant", ["qwen3-moe", "deepseek-v3"])
def test_each_process_computes_its_own_experts(variant: str, tmp_path: Path) -> None:
    """Spread over processes, an expert's number in its process is another than in the model."""
    assert_equal_to_transformers(variant, {"pp2-ep2": EXPERT_LAYOUTS["pp2-ep2"]}, tmp_path)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 700.0},
    "linear": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.5},
    "yarn": YARN | {"rope_theta": 700.0, "factor": 2.5},
}


@pytest.mark.parametrize(
    ("variant", "rope"),
    [("qwen2", "default"), ("qwen3", "linear"), ("llama", "yarn"), ("deepseek-v3", "yarn")],
)
def test_another_base_and_factor_of_the_rotation_count_under_every_number_of_processes(
    variant: str, rope: str, tmp_path: Path
) -> None:
    layouts = {name: (LAYOUTS | MORE_LAYOUTS)[name] for name in ("tp1", "tp2-pp2-sp")}
    assert_equal_to_transformers(variant, layouts, tmp_path, rope_parameters=ROPES[rope])


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("deepseek-v3", "tp2-ep2-sp"),
        pytest.param("deepseek-v3", "tp2-pp2-sp", marks=pytest.mark.ranks),
        pytest.param("qwen3", "tp4", marks=pytest.mark.ranks),
        pytest.param("glm4-moe", "pp2-ep2", marks=pytest.mark.ranks),
        pytest.param("phi3", "tp4", marks=pytest.mark.ranks),
    ],
)
def test_a_folder_of_8_bit_numbers_is_the_model_that_they_and_their_scales_say(
    variant: str, layout: str, tmp_path: Path
) -> None:
    """Blocks of 20 x 28: shards begin and end inside them."""
    plain = save_tiny(tmp_path / "plain", variant)
    said = quantise_folder(plain, tmp_path / "quantised", (20, 28))
    known = plain_folder(plain, tmp_path / "known", said)
    layouts = {layout: (LAYOUTS | EXPERT_LAYOUTS)[layout]}
    assert_equal(variant, layouts, tmp_path / "quantised", known)


KIMI_ROPE = YARN | {"rope_theta": 50000.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip


@pytest.mark.parametrize(
    "layout", ["tp2-ep2-sp", pytest.param("tp2-pp2-sp", marks=pytest.mark.ranks)]
)
def test_kimi_k2_is_deepseek_v3_of_one_group_under_another_name(
    layout: str, tmp_path: Path
) -> None:
    known = save_tiny(
        tmp_path / "known", "deepseek-v3", n_group=1, topk_group=1, rope_parameters=KIMI_ROPE
    )
    named = plain_folder(known, tmp_path / "kimi", load_file(known / "model.safetensors"))
    fields = json.loads((known / "config.json").read_text())
    (named / "config.json").write_text(json.dumps(fields | {"model_type": "kimi_k2"}))
    layouts = {layout: (LAYOUTS | EXPERT_LAYOUTS)[layout]}
    assert_equal("kimi_k2", layouts, named, known)
