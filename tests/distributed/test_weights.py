"""What goes in comes out: HF files -> shards -> HF names, at every layout, byte for byte."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rftmega.config import ParallelConfig
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.models.hf.stacked_files import open_folder
from rftmega.run.conversion import convert
from rftmega.runtime.parallel.topology import Topology
from rftmega.weights import Exporter, export_hf_folder
from tests.block_scales import quantise_folder, quantised
from tests.chosen import chosen
from tests.layouts import build_manager
from tests.ranks import RankFailure, run_ranks
from tests.tiny_models import VARIANTS, save_tiny, transformers_logits, with_predictor

LAYOUTS = {  # by the number of processes
    1: [ParallelConfig()],
    2: [ParallelConfig(tensor=2)],
    4: [
        ParallelConfig(tensor=4),  # fewer key-value heads than ranks
        ParallelConfig(pipeline=4),
        ParallelConfig(tensor=2, pipeline=2),
        ParallelConfig(tensor=2),  # two replicas
    ],
}


def exports_body(
    world: Any, folder: Path, layouts: list[ParallelConfig], bucket_bytes: int
) -> list[Any]:
    found = []
    for parallel in layouts:
        found.append(export_body(world, folder, parallel, bucket_bytes))
        Topology.destroy()
    return found


def export_body(world: Any, folder: Path, parallel: ParallelConfig, bucket_bytes: int) -> Any:
    manager = build_manager(folder, parallel)
    exporter = Exporter(manager.shards(), manager.topology.replica_group, bucket_bytes=bucket_bytes)
    largest = max(unit.bytes for bucket in exporter.buckets for unit in bucket)
    for bucket in exporter.buckets:
        assert sum(unit.bytes for unit in bucket) <= max(bucket_bytes, largest)
    tensors = list(exporter)
    assert len({name for name, _ in tensors}) == len(tensors), "a tensor came twice"
    return exporter.total_bytes, dict(tensors)


FAST = ["qwen2"]
SLOW = [
    pytest.param(variant, marks=pytest.mark.ranks) for variant in VARIANTS if variant not in FAST
]


@pytest.mark.parametrize("variant", [*FAST, *SLOW])
def test_every_process_gets_every_tensor_as_it_was_on_disk(variant: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, variant)
    files = open_folder(folder, read_hf_config(folder))
    disk = {name: files.whole(name, files.shape_of(name)) for name in files.names}
    for world, layouts in LAYOUTS.items():
        for found in run_ranks(world, exports_body, folder, layouts, 30_000):
            for parallel, (total, tensors) in zip(layouts, found, strict=True):
                assert tensors.keys() == disk.keys()
                assert all(torch.equal(tensors[name], disk[name]) for name in disk), parallel
                assert total == sum(tensor.nbytes for tensor in disk.values())


def folder_body(world: Any, source: Path, target: Path) -> None:
    manager = build_manager(source, ParallelConfig(tensor=2))
    exporter = Exporter(manager.shards(), manager.topology.replica_group, bucket_bytes=10_000)
    export_hf_folder(exporter, source, target, write=world.rank == 0)
    Topology.destroy()
    export_hf_folder(exporter, source, target, write=world.rank == 0)  # over an older export


def test_an_exported_folder_is_one_that_transformers_loads(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "qwen2-tied")
    run_ranks(2, folder_body, source, tmp_path / "target")
    rows = [[1, 2, 3, 4]]
    assert torch.equal(
        transformers_logits(tmp_path / "target", rows)[0], transformers_logits(source, rows)[0]
    )
    assert json.loads((tmp_path / "target/config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]  # no draft left


def load_body(world: Any, folder: Path) -> None:
    build_manager(folder, ParallelConfig())


def damaged(folder: Path, what: str) -> Path:
    save_tiny(folder, "qwen3-tied" if what == "another head" else "llama")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if what == "a tensor missing":
        del tensors["model.layers.2.mlp.up_proj.weight"]
    if what == "a wrong shape":
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3, 3)
    if what == "two shapes swapped":
        up, down = (f"model.layers.2.mlp.{name}_proj.weight" for name in ("up", "down"))
        tensors[up], tensors[down] = tensors[down], tensors[up]
    if what == "a tensor too many":
        tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)
    if what == "another head":
        tensors["lm_head.weight"] = torch.zeros(131, 64)
    if what == "a file cut off":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        save_file(tensors, file)
    return folder


def refusal_body(world: Any, folder: Path, parallel: ParallelConfig, dtype: str) -> str:
    try:
        build_manager(folder, parallel, dtype=dtype)
    except CheckpointError as error:
        return str(error)
    return ""


def refused_body(world: Any, folders: dict[str, Path]) -> dict[str, str]:
    return {
        what: refusal_body(world, folder, ParallelConfig(), "float32")
        for what, folder in folders.items()
    }


@pytest.fixture(scope="module")
def refusals(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("damaged")
    folders = {what: damaged(folder / what, what) for what in chosen(request, "what")}
    (said,) = run_ranks(1, refused_body, folders)
    return said


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        (
            "a tensor too many",
            "1 tensor(s) that its config.json does not lead to, 'model.layers.0.self_attn.sinks' first",
        ),
        (
            "another head",
            "tie_word_embeddings=true, but lm_head.weight is not model.embed_tokens.weight",
        ),
        ("a tensor missing", "holds no tensor 'model.layers.2.mlp.up_proj.weight'"),
        (
            "a wrong shape",
            "model.layers.2.mlp.up_proj.weight has shape (3, 3); config.json asks for (96, 64)",
        ),
        (
            "two shapes swapped",
            "model.layers.2.mlp.up_proj.weight has shape (64, 96); config.json asks for (96, 64)",
        ),
        ("a file cut off", "model.safetensors can't be read"),
    ],
)
def test_damaged_weights_are_refused_by_name(
    what: str, complaint: str, refusals: dict[str, str]
) -> None:
    assert complaint in refusals[what]


@pytest.mark.parametrize(
    ("variant", "name", "like"),
    [
        ("qwen3-tied", "lm_head.weight", "model.embed_tokens.weight"),  # written out, and equal
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", "model.norm.weight"),
    ],
)
def test_what_the_family_leaves_out_may_be_in_the_folder(
    variant: str, name: str, like: str, tmp_path: Path
) -> None:
    file = save_tiny(tmp_path, variant) / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[like].clone()}, file)
    run_ranks(1, load_body, tmp_path)


def test_layers_that_predict_a_second_token_may_be_in_the_folder(tmp_path: Path) -> None:
    with_predictor(save_tiny(tmp_path, "deepseek-v3"), 4)
    run_ranks(1, load_body, tmp_path)


def read_body(world: Any, folder: Path, parallel: ParallelConfig) -> int:
    """Elements that this rank asks the files for."""
    from rftmega.models.hf.hf_folder import HFFolder

    asked = []

    class Counting:
        def __init__(self, inner: Any):
            self.inner = inner

        def __getitem__(self, index: Any) -> torch.Tensor:
            found = self.inner[index]
            asked.append(found.numel())
            return found

    real = HFFolder.slice_of
    HFFolder.slice_of = lambda self, name, shape: Counting(real(self, name, shape))
    build_manager(folder, parallel)
    return sum(asked)


def test_ranks_together_read_each_sharded_element_once(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    whole = sum(t.numel() for t in tensors.values())
    norms = sum(t.numel() for t in tensors.values() if t.dim() == 1)
    read = run_ranks(4, read_body, folder, ParallelConfig(tensor=2, pipeline=2))
    assert sum(read) == whole + norms  # norms are held by both tensor-parallel ranks
    assert max(read) < 0.4 * whole


def poisoned(folder: Path, places: dict[str, float]) -> None:
    """Sets one number of each tensor, towards its end."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in places.items():
        tensors[name].view(-1)[-3] = value
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("variant", "places", "dtype"),
    [
        (
            "qwen2",
            {"model.layers.3.self_attn.v_proj.bias": math.nan, "model.norm.weight": math.inf},
            "float32",
        ),
        pytest.param(
            "qwen2-tied",
            {"model.embed_tokens.weight": math.nan},
            "float32",
            marks=pytest.mark.ranks,
        ),
        pytest.param(
            "deepseek-v3",
            {"model.layers.2.mlp.gate.e_score_correction_bias": math.nan},
            "float32",
            marks=pytest.mark.ranks,
        ),
        pytest.param(
            "qwen3-moe",
            {"model.layers.3.mlp.experts.3.up_proj.weight": math.nan},
            "float32",
            marks=pytest.mark.ranks,
        ),
        # finite in the folder, not in training
        ("qwen2", {"model.layers.0.mlp.down_proj.weight": 3.4e38}, "bfloat16"),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_name_on_all_ranks(
    variant: str, places: dict[str, float], dtype: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, variant)
    poisoned(folder, places)
    parallel = (
        ParallelConfig(pipeline=2, expert=2)
        if variant == "qwen3-moe"
        else ParallelConfig(tensor=2, pipeline=2, sequence=True)
    )
    said = set(run_ranks(4, refusal_body, folder, parallel, dtype))
    assert len(said) == 1
    assert (
        f"in {len(places)} tensor(s): {', '.join(sorted(places))}. Nothing can be learnt"
        in said.pop()
    )


def distributed_body(world: Any, source: Path, target: Path) -> str:
    convert.to_megatron(source, target, ParallelConfig())
    return refusal_body(world, target, ParallelConfig(), "float32")


def test_a_distributed_checkpoint_with_nan_is_refused_by_name(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", "qwen2")
    poisoned(source, {"model.layers.1.mlp.gate_proj.weight": math.nan})
    assert (
        "1 tensor(s): model.layers.1.mlp.gate_proj.weight."
        in run_ranks(1, distributed_body, source, tmp_path / "ours")[0]
    )


def diverged_body(world: Any, source: Path, target: Path) -> str:
    manager = build_manager(source, ParallelConfig(tensor=2))
    exporter = Exporter(manager.shards(), manager.topology.replica_group, bucket_bytes=10_000)
    export_hf_folder(exporter, source, target, write=world.rank == 0)
    if world.rank == 1:
        fused = next(
            item
            for item in manager.bound
            if item.hf_names[-1] == "model.layers.0.mlp.up_proj.weight"
        )
        with torch.no_grad():
            fused.parameter[-1, 0] = math.nan  # gate above up
    try:
        export_hf_folder(exporter, source, target, write=world.rank == 0)
    except CheckpointError as error:
        return str(error)
    return ""


def test_an_export_refuses_weights_that_are_not_finite_and_keeps_the_earlier_one(
    tmp_path: Path,
) -> None:
    source = save_tiny(tmp_path / "source", "qwen2")
    said = run_ranks(2, diverged_body, source, tmp_path / "target")
    assert said[0] == said[1]
    assert (
        "where an earlier export stays: model.layers.0.mlp.up_proj.weight holds NaN or infinity"
        in said[0]
    )
    kept, before = (
        load_file(next(folder.glob("*.safetensors"))) for folder in (tmp_path / "target", source)
    )
    assert all(torch.equal(kept[name], before[name]) for name in before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]


def nan_back_body(world: Any, source: Path, ours: Path, back: Path) -> str:
    convert.to_megatron(source, ours, ParallelConfig())
    try:
        convert.to_hf(ours, back)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_conversion_to_hugging_face_refuses_weights_that_are_not_finite(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "hf", "qwen2")
    poisoned(source, {"model.layers.1.mlp.gate_proj.weight": math.inf})
    said = run_ranks(1, nan_back_body, source, tmp_path / "ours", tmp_path / "back")[0]
    assert (
        said
        == f"model.layers.1.mlp.gate_proj.weight holds NaN or infinity, so it is not written to {tmp_path / 'back'}."
    )
    assert not list((tmp_path / "back").glob("*.safetensors*"))


def quantised_body(world: Any, source: Path, target: Path) -> None:
    manager = build_manager(source, ParallelConfig(tensor=2))
    exporter = Exporter(manager.shards(), manager.topology.replica_group, bucket_bytes=10_000)
    export_hf_folder(exporter, source, target, write=world.rank == 0, quantised=True)


@pytest.mark.parametrize("variant", ["deepseek-v3", pytest.param("phi3", marks=pytest.mark.ranks)])
def test_an_export_may_be_quantised_as_its_source_is(variant: str, tmp_path: Path) -> None:
    source, target, block = tmp_path / "source", tmp_path / "target", (16, 32)
    meant = quantise_folder(save_tiny(tmp_path / "plain", variant), source, block)
    run_ranks(2, quantised_body, source, target)
    stored, found = load_file(source / "model.safetensors"), {}
    for file in target.glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == stored.keys()
    kind = getattr(torch, json.loads((source / "config.json").read_text())["dtype"])
    for name, tensor in meant.items():
        if f"{name}_scale_inv" not in stored:
            assert torch.equal(found[name], tensor), name
            continue
        numbers, scales = quantised(tensor.to(kind).float(), block)
        assert torch.equal(found[name].view(torch.uint8), numbers.view(torch.uint8)), name
        assert torch.equal(found[f"{name}_scale_inv"], scales)
    assert json.loads((target / "config.json").read_text())["quantization_config"]["fmt"] == "e4m3"


def test_an_export_of_plain_weights_is_not_quantised(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "plain", "qwen2")
    with pytest.raises(RankFailure, match="has no quantised weights, as which to write others"):
        run_ranks(2, quantised_body, source, tmp_path / "target")
