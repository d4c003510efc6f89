"""Nothing that is learnt depends on the layout, the micro-batch size or the order of rows; see
tests/invariance.py.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rftmega.backends.megatron import manager
from rftmega.config import ParallelConfig
from tests.invariance import (
    ALIKE,
    ALONE,
    LAYOUTS,
    OVERLAPPED,
    PROMPTS,
    QUANTITIES,
    ROWS,
    SETTINGS,
    Layout,
    P,
    Setting,
    differences,
    every_case,
    layouts_of,
    learn_body,
    number_of_cases,
    runs_of,
    saved,
    write,
)
from tests.layouts import build_actor, rows_of
from tests.plain_loop import log_probs
from tests.ranks import run_ranks
from tests.tiny_models import VARIANTS, save_tiny

TOLERANCE = 1e-5


# What planted bugs need, a layout of each kind, and the attention of deepseek-v3, which is another.
# `test_every_case_of_the_table` has all layouts of all models. test_adapters.py and
# test_fsdp_adapters.py compare adapters with plain torch, test_vision.py images with transformers.
QUICK = {
    "qwen3": (
        "one process, full recompute",
        "TP2, SP",
        "CP2",
        "PP2, first stage of 1 layer",
        "FSDP 2, ZeRO-2",
        "DP2, distributed optimizer, overlapped",
        "FSDP 2 x TP2, on the host",
    ),
    "qwen2-tied": ("PP2 x VPP2", "FSDP, 2 replicas x 2"),
    "qwen3-moe": (
        "EP2 x TP2 (one process an expert)",
        "TP2, SP, distributed optimizer (whole experts)",
    ),
    "deepseek-v3": ("TP2, SP",),
    "gpt-oss": ("EP2 x TP2 (one process an expert)",),
    "qwen3.5": ("TP2 x CP2, SP",),
    "qwen3_vl": ("FSDP 2",),
    f"qwen3{ALIKE}": (
        "one process, shared",
        "TP2, SP",
        "PP2 x VPP2",
        "FSDP 2 x TP2, on the host",
    ),
    f"deepseek-v3{ALIKE}": ("one process, shared",),
    f"qwen3_vl{ALIKE}": ("one process, shared",),
}


def assert_equal(found: list[dict], wanted: dict, case: str) -> None:
    for quantity, difference in differences(found, wanted).items():
        assert difference < TOLERANCE, (case, quantity, difference)


@pytest.mark.ranks
def test_in_one_process_the_micro_batch_size_and_the_order_of_rows_do_not_matter(
    tmp_path: Path,
) -> None:
    runs = runs_of(saved(tmp_path, "qwen3"), ALONE, SETTINGS)
    alone = {setting: found[0] for setting, found in zip(SETTINGS, runs, strict=True)}
    for setting, found in alone.items():
        reference = Setting(setting.aggregation)
        assert_equal([found], alone[reference], str(setting))
    token_mean, sequence_mean = (
        alone[Setting(aggregation)] for aggregation in ("token_mean", "sequence_mean")
    )
    assert differences([token_mean], sequence_mean)["loss"] > 1e-2, (
        "the aggregation changed nothing, so it was not compared"
    )
    moved = token_mean["logp"][1] - token_mean["logp"][0]
    assert moved.abs().max() > 0.1, "nothing was learnt, so nothing was compared"


def layouts_body(world: Any, folder: Path, layouts: dict[str, Layout]) -> dict[str, Any]:
    found = {}
    for name, layout in layouts.items():
        try:
            (found[name],) = learn_body(world, folder, layout, [Setting()])
        except Exception as error:
            error.add_note(f"layout: {name}")
            raise
    return found


@pytest.mark.parametrize(
    "variant",
    [pytest.param(x, marks=[pytest.mark.ranks] if x == "gpt-oss" else []) for x in QUICK],
)
def test_three_updates_are_those_of_one_process_under_every_layout(
    variant: str, tmp_path: Path
) -> None:
    """Layouts of as many processes are learnt under in the same ones, one after the other."""
    folder = saved(tmp_path, variant)
    every = layouts_of(variant, "")
    layouts = {name: every[name] for name in ("one process", *QUICK[variant])}
    found: dict[str, list[dict]] = {}
    for processes in sorted({layout.processes for layout in layouts.values()}):
        alike = {name: each for name, each in layouts.items() if each.processes == processes}
        ranks = run_ranks(processes, layouts_body, folder, alike)
        found |= {name: [rank[name] for rank in ranks] for name in alike}
    for name, runs in found.items():
        assert_equal(runs, found["one process"][0], name)


def small_buckets_body(world: Any, folder: Path, layout: Layout) -> Any:
    """Many buckets, as large models have them: each is gathered and reduced at a time of its own."""
    manager.DistributedDataParallelConfig = partial(
        manager.DistributedDataParallelConfig, bucket_size=3000
    )
    (found,) = learn_body(world, folder, layout, [Setting()])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("variant", ["qwen3", "qwen2-tied"])
def test_with_overlap_and_many_buckets_nothing_stale_is_used(variant: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, variant)
    (alone,) = runs_of(folder, ALONE, [Setting()])
    for layout in (
        Layout(2, P(), OVERLAPPED),
        Layout(4, P(pipeline=2, virtual_pipeline=2), OVERLAPPED),
    ):
        assert_equal(
            run_ranks(layout.processes, small_buckets_body, folder, layout), alone[0], str(layout)
        )


@pytest.mark.ranks
def test_norms_over_all_heads_and_behind_layers_learn_as_in_one_process(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "olmo2")
    (alone,) = runs_of(folder, ALONE, [Setting()])
    (found,) = runs_of(folder, Layout(4, P(tensor=4)), [Setting()])  # two ranks have the same keys
    assert_equal(found, alone[0], "TP4")


@pytest.mark.ranks
def test_every_case_of_the_table(tmp_path: Path) -> None:
    """Every layout, aggregation, micro-batch size and order in fp32; every layout in bf16.

    Also writes the table.
    """
    rows = list(every_case(tmp_path, list(LAYOUTS)))
    write(rows, "")
    # The noise of bf16 is what one process of the same model shows; another order of sums may show
    # a few times that.
    noise = {
        case["model"]: case
        for case in rows
        if case["dtype"] == "bfloat16" and case["layout"] == "one process"
    }
    wrong = []
    for case in rows:
        for name in QUANTITIES:
            bound = (
                TOLERANCE if case["dtype"] == "float32" else 4 * noise[case["model"]][name] + 1e-3
            )
            if not case[name] < bound:
                wrong.append((case, name, bound))
    assert not wrong, wrong
    assert all(case["loss"] < 0.01 and case["grad_norm"] < 0.02 for case in noise.values()), (
        "that is more than noise"
    )
    assert len(rows) == number_of_cases()


def both_dtypes_body(world: Any, folders: list[Path]) -> list[list[torch.Tensor]]:
    """Log-probs of every token in float32 and in bfloat16, of each model."""
    rows = rows_of(ROWS, PROMPTS)
    fed = torch.arange(rows.tokens.shape[1] - 1) < rows.lengths[:, None] - 1
    found = []
    for folder in folders:
        actors = [
            build_actor(folder, ParallelConfig(), dtype=dtype, token_cap=512)
            for dtype in ("float32", "bfloat16")
        ]
        found.append([actor.log_probs(rows).logp[fed] for actor in actors])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("variant", [name for name in LAYOUTS if name in VARIANTS])
def test_bfloat16_is_as_far_from_float32_as_it_is_in_transformers(
    variant: str, tmp_path: Path
) -> None:
    """Over eight models.

    In a mixture a few tokens go to other experts, in some models more of ours, in some of theirs.
    """
    folders = [save_tiny(tmp_path / str(seed), variant, seed=seed) for seed in range(8)]
    (ours,) = run_ranks(1, both_dtypes_body, folders)
    theirs = []
    for folder in folders:
        models = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16)
        ]
        with torch.no_grad():
            theirs.append([torch.cat(log_probs(model, ROWS)).float() for model in models])
    torch.testing.assert_close(
        [pair[0] for pair in ours], [pair[0] for pair in theirs], atol=1e-5, rtol=0
    )
    noise, wanted = (
        sum(float((rough - fine).abs().mean()) for fine, rough in pairs) for pairs in (ours, theirs)
    )
    assert noise < 1.25 * wanted
