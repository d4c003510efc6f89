"""With Transformer Engine's modules (its stub, see tests/stub_te.py) the model is the same model,
under other names.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rftmega.checkpoints.reader import NORMS
from rftmega.config import ParallelConfig
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.models.hf.stacked_files import open_folder
from rftmega.models.layers import latent_attention
from rftmega.run.conversion import convert
from rftmega.weights import EngineWeights, Exporter, export_hf_folder
from tests.block_engine import BlockEngine
from tests.distributed import test_value_adapters
from tests.distributed.test_adapters import LAYOUTS as CASES
from tests.distributed.test_adapters import MIXED, assert_learns_as_plain_torch
from tests.distributed.test_checkpoints import (
    PLAIN,
    SHARDED,
    actor_of,
    kept_by,
    learn,
    tensors,
)
from tests.distributed.test_shared_base import assert_one_copy
from tests.invariance import (
    ALIKE,
    ALONE,
    ENGINE,
    LAYOUTS,
    Layout,
    Setting,
    differences,
    learn_body,
    runs_of,
    saved,
)
from tests.layouts import build_manager, packed_logits
from tests.ranks import LOCAL, TRANSFORMER_ENGINE, run_ranks
from tests.tiny_models import VARIANTS, save_tiny, transformers_logits

P = ParallelConfig
ROWS = [
    [5, 9, 130, 2, 77],
    [3, 0],
    [int(x) for x in torch.arange(40) * 37 % 131],
    [1, 2, 3, 4, 5, 6],
]
QUICK = ("deepseek-v3", "phi4-mini")
MODELS = [
    pytest.param(variant, marks=() if variant in QUICK else pytest.mark.ranks)
    for variant in VARIANTS
]


def sparse(variant: str) -> bool:
    return "moe" in variant or variant.startswith(("mixtral", "deepseek", "gpt-oss", "minimax"))


def model_body(world: Any, folder: Path, exported: Path, parallel: ParallelConfig) -> Any:
    """(names of parameters, logits); what is exported and pushed is what was loaded."""
    manager = build_manager(folder, parallel)
    model = manager.description
    assert manager.config.gradient_accumulation_fusion
    assert manager.config.bias_activation_fusion == (
        model.activation == "silu" and not model.clamped
    )
    assert manager.config.apply_rope_fusion == (
        not (model.latent or model.rope.yarn or model.rope.long or model.rotated_pairs)
    )
    assert not manager.chunks[-1].output_layer.gradient_accumulation_fusion, (
        "Megatron's own layer would need apex"
    )
    files = open_folder(folder, read_hf_config(folder))
    disk = {name: files.whole(name, files.shape_of(name)) for name in files.names}
    exporter = Exporter(manager.shards(), manager.topology.replica_group, bucket_bytes=30_000)
    out = {name: tensor.clone() for name, tensor in exporter}
    assert out.keys() == disk.keys()
    assert all(torch.equal(out[name], disk[name]) for name in disk)
    export_hf_folder(exporter, folder, exported, write=world.rank == 0)
    engine = BlockEngine(world.rank, world.size)
    EngineWeights(manager.shards(), engine, bucket_bytes=10_000).push(version=1)
    assert engine.loaded.keys() == disk.keys()
    assert all(torch.equal(engine.loaded[name], engine.block(name, disk[name])) for name in disk)
    return {
        name for chunk in manager.chunks for name, _ in chunk.named_parameters()
    }, packed_logits(manager, ROWS)


@pytest.mark.parametrize("variant", MODELS)
def test_every_family_binds_loads_computes_exports_and_pushes_under_the_fused_names(
    variant: str, tmp_path: Path
) -> None:
    folder, exported = save_tiny(tmp_path / "model", variant), tmp_path / "exported"
    parallel = P(tensor=2, sequence=sparse(variant))
    (names, logits), _ = run_ranks(
        2, model_body, folder, exported, parallel, preloaded=TRANSFORMER_ENGINE
    )
    wanted = torch.cat([rows[:-1] for rows in transformers_logits(exported, ROWS)])
    assert (logits - wanted).abs().max() < 1e-5
    fused = {name.partition("layers.")[2].partition(".")[2] for name in names}
    latent, behind = variant.startswith("deepseek"), variant in ("olmo2", "exaone4")
    assert (
        (
            ("self_attention.linear_kv_up_proj" if latent else "self_attention.linear_qkv")
            + ".layer_norm_weight"
        )
        in fused
    ) == (not behind)
    assert ("self_attention.linear_proj.post_layernorm.weight" in fused) == (
        behind or variant in ("gemma3", "glm4")
    )
    assert ("mlp.experts.linear_fc2.weight3" in fused) == sparse(variant)
    assert ("mlp.linear_fc1.layer_norm_weight" in fused) == (
        variant
        not in ("mixtral", "qwen3-moe-plain-weights", "gpt-oss", "minimax-m2", "qwen3.5-moe")
        and not behind
    )


# all of them: tests/invariance.py
FEW = {"qwen3": "TP2 x CP2, SP", "qwen3-moe": "EP2 x TP2 x ETP2", "deepseek-v3": "TP2, SP"}


@pytest.mark.ranks
@pytest.mark.parametrize("variant", list(FEW))
def test_three_updates_are_those_of_the_local_modules_in_one_process(
    variant: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, variant)
    ((alone,),) = runs_of(folder, ALONE, [Setting()])
    (found,) = runs_of(folder, ENGINE[variant][f"{FEW[variant]}, Transformer Engine"], [Setting()])
    for quantity, difference in differences(found, alone).items():
        assert difference < 1e-5, (quantity, difference)


def unmended_body(world: Any, folder: Path, layout: Layout) -> Any:
    latent_attention._count_once = lambda down: None
    return learn_body(world, folder, layout, [Setting()])[0]


@pytest.mark.ranks
def test_without_our_mending_whole_down_projections_count_once_a_rank_in_the_norm(
    tmp_path: Path,
) -> None:
    """The stub has the fault that Transformer Engine has, so its absence above is our doing."""
    folder = save_tiny(tmp_path, "deepseek-v3")
    ((alone,),) = runs_of(folder, ALONE, [Setting()])
    layout = LAYOUTS["deepseek-v3"]["TP2, SP"]
    found = run_ranks(2, unmended_body, folder, layout, preloaded=TRANSFORMER_ENGINE)[0][
        "grad_norm"
    ]
    assert (found / alone["grad_norm"] > 1.005).all(), (found, alone["grad_norm"])


def local_name(key: str) -> str:
    for own, fused in NORMS.items():
        key = key.removesuffix(fused) + own if key.endswith(f".{fused}") else key
    return key


MORE_STEPS = 2


def save_body(world: Any, model: Path, folder: Path, case: tuple[Any, ...]) -> list[float]:
    """Returns the losses of the steps after a step and a save."""
    actor = actor_of(model, *case)
    learn(actor, 1)
    kept_by(actor, folder).save({}, step=1)
    return learn(actor, MORE_STEPS)


def resume_body(
    world: Any, model: Path, folder: Path, again: Path, case: tuple[Any, ...]
) -> list[float]:
    """Returns the losses of steps after the saved one, which is saved `again` first."""
    actor = actor_of(model, *case)
    assert kept_by(actor, folder).resume() is not None
    kept_by(actor, again).save({}, step=1)
    return learn(actor, MORE_STEPS)


SWAPS = [
    ("deepseek-v3", LOCAL, TRANSFORMER_ENGINE, P(tensor=2, sequence=True), P(expert=2), SHARDED),
    ("qwen3-moe", TRANSFORMER_ENGINE, LOCAL, P(expert=2), P(pipeline=2), SHARDED),
    *(
        (variant, *way, P(tensor=2, sequence=True), P(pipeline=2), optimizer)
        for variant in ("qwen3", "qwen3-moe", "deepseek-v3", "deepseek-v3-yarn-plain-queries")
        for way in ((LOCAL, TRANSFORMER_ENGINE), (TRANSFORMER_ENGINE, LOCAL))
        for optimizer in (PLAIN, SHARDED)
    ),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("variant", "first", "second", "before", "after", "optimizer"), SWAPS)
def test_a_run_saved_with_one_kind_of_modules_goes_on_with_the_other(
    variant: str,
    first: str,
    second: str,
    before: ParallelConfig,
    after: ParallelConfig,
    optimizer: Any,
    tmp_path: Path,
) -> None:
    folder, kept, again = (
        save_tiny(tmp_path / "model", variant),
        tmp_path / "kept",
        tmp_path / "again",
    )
    case = (before, optimizer, "float32", 0.0)
    expected, *_ = run_ranks(2, save_body, folder, kept, case, preloaded=first)
    case = (after, optimizer, "float32", 0.0)
    found, *_ = run_ranks(2, resume_body, folder, kept, again, case, preloaded=second)
    assert len(found) == MORE_STEPS
    assert found == pytest.approx(expected, rel=1e-5)
    saved, back = (
        {local_name(key): tensor for key, tensor in tensors(each / "step_000001").items()}
        for each in (kept, again)
    )
    assert saved.keys() == back.keys()
    assert all(torch.equal(saved[key], back[key]) for key in saved)


def convert_body(world: Any, source: Path, target: Path) -> None:
    convert.to_megatron(source, target, P())


def loaded_body(world: Any, folder: Path) -> Any:
    manager = build_manager(folder, P())
    return {
        name: tensor.clone()
        for name, tensor in Exporter(
            manager.shards(), manager.topology.replica_group, bucket_bytes=2**20
        )
    }


@pytest.mark.parametrize("variant", ["qwen3-moe", "deepseek-v3"])
def test_a_distributed_checkpoint_of_either_kind_of_modules_starts_the_other(
    variant: str, tmp_path: Path
) -> None:
    source = save_tiny(tmp_path / "hf", variant)
    disk = load_file(source / "model.safetensors")
    for one, other in ((LOCAL, TRANSFORMER_ENGINE), (TRANSFORMER_ENGINE, LOCAL)):
        run_ranks(1, convert_body, source, tmp_path / one, preloaded=one)
        (found,) = run_ranks(1, loaded_body, tmp_path / one, preloaded=other)
        assert all(torch.equal(found[name], disk[name]) for name in disk)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("qwen3", "TP2, SP"),
        pytest.param("olmo2", "TP2", marks=pytest.mark.ranks),
        pytest.param("qwen3-tied", "full recompute", marks=pytest.mark.ranks),
    ],
)
def test_adapters_learn_as_in_plain_torch(variant: str, name: str, tmp_path: Path) -> None:
    assert_learns_as_plain_torch(tmp_path, variant, CASES[name], preloaded=TRANSFORMER_ENGINE)


@pytest.mark.parametrize(
    "name",
    ["EP2, full recompute", pytest.param("TP2, split experts", marks=pytest.mark.ranks)],
)
def test_adapters_beside_the_grouped_layers_of_experts_learn_as_in_plain_torch(
    name: str, tmp_path: Path
) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3-moe", MIXED[name], preloaded=TRANSFORMER_ENGINE)


@pytest.mark.ranks
def test_a_value_model_with_adapters_learns_as_in_plain_torch(tmp_path: Path) -> None:
    case = test_value_adapters.LAYOUTS["TP2, SP"]
    test_value_adapters.assert_learns_as_plain_torch(
        tmp_path, "qwen3", case, preloaded=TRANSFORMER_ENGINE
    )


@pytest.mark.ranks
def test_a_critic_computes_with_the_policys_modules_weights(tmp_path: Path) -> None:
    assert_one_copy(tmp_path, CASES["PP2 x VPP2"], preloaded=TRANSFORMER_ENGINE)


# with windows and rotary embeddings by layer; latent; image positions
BEGIN_ALIKE = {
    "qwen3": (),
    "gemma3": (pytest.mark.ranks,),
    "deepseek-v3": (),
    "qwen3_vl": (pytest.mark.ranks,),
}


@pytest.mark.parametrize(
    "variant", [pytest.param(variant, marks=marks) for variant, marks in BEGIN_ALIKE.items()]
)
def test_updates_are_the_same_where_beginnings_are_computed_once(
    variant: str, tmp_path: Path
) -> None:
    """Against one process with local modules, in which each row computes its own."""
    folder = saved(tmp_path, variant + ALIKE)
    ((alone,),) = runs_of(folder, replace(ALONE, shares=False), [Setting()])
    layout = ENGINE[variant + ALIKE]["one process, Transformer Engine"]
    (found,) = runs_of(folder, layout, [Setting()])
    for quantity, difference in differences(found, alone).items():
        assert difference < 1e-5, (quantity, difference)
