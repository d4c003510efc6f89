"""The model that Megatron computes is the model that transformers computes, under every layout."""

import json
from collections.abc import Sequence
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
    "tp2-pp2-sp": (4, ParallelConfig(tensor=2, pipeline=2, sequence=True)),
}
# fewer key-value heads (2) than ranks
KEYS_OF_SEVERAL: dict[str, tuple[int, ParallelConfig]] = {"tp4": (4, ParallelConfig(tensor=4))}
MORE_LAYOUTS: dict[str, tuple[int, ParallelConfig]] = KEYS_OF_SEVERAL | {
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


# Other tests of this file compute these as well, under other rotations or layouts.
ALSO_ELSEWHERE = (
    *("llama-linear-rope", "llama-yarn", "qwen2", "qwen3", "deepseek-v3"),
    *("smollm3", "arcee"),
)
MODELS = [
    pytest.param(variant, marks=pytest.mark.ranks if variant in ALSO_ELSEWHERE else ())
    for variant in VARIANTS
]
Layouts = dict[str, tuple[int, ParallelConfig]]
Case = tuple[Path, ParallelConfig]


def logits_body(world: Any, cases: list[Case]) -> list[torch.Tensor | None]:
    """Of each model in its layout, one after the other."""
    found = []
    for folder, parallel in cases:
        try:
            found.append(packed_logits(build_manager(folder, parallel), ROWS))
        except Exception as error:
            error.add_note(f"model and layout: {folder.name}, {parallel}")
            raise
        dist.barrier()
    return found


def logits_of(processes: int, cases: list[Case]) -> list[list[torch.Tensor]]:
    """[case], of all processes that have them."""
    ranks = run_ranks(processes, logits_body, cases, timeout=120.0 + 60.0 * len(cases))
    return [
        [logits for logits in found if logits is not None] for found in zip(*ranks, strict=True)
    ]


def assert_equal_to_transformers(
    variants: Sequence[str], layouts: Layouts, folder: Path, **changes: Any
) -> None:
    models = {folder / variant: variant for variant in variants}
    for each, variant in models.items():
        save_tiny(each, variant, **changes)
    assert_equal(layouts, {each: each for each in models})


def assert_equal(layouts: Layouts, folders: dict[Path, Path]) -> None:
    """`folders`: each model's, and one of the same model that transformers reads."""
    for processes, parallel in layouts.values():
        ours = logits_of(processes, [(folder, parallel) for folder in folders])
        for known, found in zip(folders.values(), ours, strict=True):
            assert_found(found, known)


def assert_found(found: list[torch.Tensor], known: Path) -> None:
    wanted = torch.cat([logits[:-1] for logits in transformers_logits(known, ROWS)])
    assert found
    for logits in found:
        difference = (logits - wanted).abs().max()
        assert difference < 1e-5, (known.name, difference)


@pytest.fixture(scope="module")
def computed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[list[torch.Tensor]]]]:
    """Of each model that a test was chosen for: its folder, and logits under each layout. The same
    processes compute all of them.
    """
    chosen = {
        item.callspec.params["variant"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == COMPUTED
    }
    folders = {
        variant: save_tiny(tmp_path_factory.mktemp(variant), variant) for variant in sorted(chosen)
    }
    cases = [
        (variant, parallel)
        for variant in folders
        for _, parallel in (LAYOUTS | (KEYS_OF_SEVERAL if variant == "olmo2" else {})).values()
    ]
    found = logits_of(4, [(folders[variant], parallel) for variant, parallel in cases])
    by_model: dict[str, list[list[torch.Tensor]]] = {}
    for (variant, _), logits in zip(cases, found, strict=True):
        by_model.setdefault(variant, []).append(logits)
    return {variant: (folders[variant], each) for variant, each in by_model.items()}


COMPUTED = "test_logits_equal_those_of_transformers"


@pytest.mark.parametrize("variant", MODELS)
def test_logits_equal_those_of_transformers(
    variant: str, computed: dict[str, tuple[Path, list[list[torch.Tensor]]]]
) -> None:
    folder, found = computed[variant]
    for logits in found:
        assert_found(logits, folder)


@pytest.mark.ranks
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_equal_those_of_transformers_under_the_other_layouts(
    variant: str, tmp_path: Path
) -> None:
    has_experts = "moe" in variant or variant.startswith(
        ("mixtral", "deepseek", "gpt-oss", "minimax")
    )
    layouts = {  # Megatron refuses to split experts that have biases
        name: (processes, parallel)
        for name, (processes, parallel) in (MORE_LAYOUTS | EXPERT_LAYOUTS).items()
        if (has_experts or name in MORE_LAYOUTS)
        and (variant != "gpt-oss" or parallel.expert_tensor == 1)
    }
    assert_equal_to_transformers([variant], layouts, tmp_path)


def test_each_process_computes_its_own_experts(tmp_path: Path) -> None:
    """Spread over processes, an expert's number in its process is another than in the model."""
    layouts = {"pp2-ep2": EXPERT_LAYOUTS["pp2-ep2"]}
    assert_equal_to_transformers(["qwen3-moe", "deepseek-v3"], layouts, tmp_path)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 700.0},
    "linear": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.5},
    "yarn": YARN | {"rope_theta": 700.0, "factor": 2.5},
}


def test_another_base_and_factor_of_the_rotation_count_under_every_number_of_processes(
    tmp_path: Path,
) -> None:
    cases = (("qwen2", "default"), ("qwen3", "linear"), ("llama", "yarn"), ("deepseek-v3", "yarn"))
    folders = [
        save_tiny(tmp_path / variant, variant, rope_parameters=ROPES[rope])
        for variant, rope in cases
    ]
    layouts = {name: (LAYOUTS | MORE_LAYOUTS)[name] for name in ("tp1", "tp2-pp2-sp")}
    assert_equal(layouts, {folder: folder for folder in folders})


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
    layouts = {layout: (LAYOUTS | MORE_LAYOUTS | EXPERT_LAYOUTS)[layout]}
    assert_equal(layouts, {tmp_path / "quantised": known})


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
    assert_equal(layouts, {named: known})
