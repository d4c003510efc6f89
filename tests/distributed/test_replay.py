"""The recorded copies of an engine's loader give what the loader itself gives, or are left to it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rftmega.config import ParallelConfig
from rftmega.core.errors import EngineError
from rftmega.weights import EngineWeights, push
from tests.fused_engine import FusedEngine
from tests.layouts import build_manager
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
NORM = "model.norm.weight"


def bits(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: parameter.view(torch.int16 if parameter.itemsize == 2 else torch.int32)
        for name, parameter in parameters.items()
    }


def replayed_body(
    world: Any, folder: Path, parallel: ParallelConfig, ranks: int, dtype: torch.dtype
) -> Any:
    manager = build_manager(folder, parallel)
    disk = load_file(folder / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in disk.items()}
    for bucket_bytes in (2**30, 10_000):
        engine, plain = (
            FusedEngine(world.rank % ranks, ranks, shapes, dtype=dtype) for _ in range(2)
        )
        weights = EngineWeights(manager.shards(), engine, bucket_bytes=bucket_bytes)
        before = 1.0
        # of the folder's weights: others at every push
        for version, scale in enumerate((0.5, 2.0, 0.25, 1.0)):
            with torch.no_grad():
                for item in manager.bound:
                    item.parameter.mul_(scale / before)
            before = scale
            metrics = weights.push(version=version)
            plain.load_weights(
                ((name, tensor * scale) for name, tensor in disk.items()), version=version
            )
            assert engine.version == version
            assert metrics["push_bytes"] == metrics["push_bytes_least"]
            assert engine.by_loader == (disk.keys() if version == 0 else set()), (
                "it was not the recording that loaded"
            )
            found, wanted = bits(engine.parameters), bits(plain.parameters)
            wrong = [name for name in wanted if not torch.equal(found[name], wanted[name])]
            assert not wrong, (version, wrong)
            sums = weights.checksums()
            assert all(each.intact for each in sums)
            assert {each.name for each in sums} == disk.keys()
        item, kept = manager.bound[0], manager.bound[0].parameter.detach().clone()
        with torch.no_grad():
            item.parameter.add_(1.0)
            stale = {each.name for each in weights.checksums() if each.held != each.sent}
            item.parameter.copy_(kept)
        assert stale.issuperset(item.rule.hf_names(item.layer, item.expert)), (
            "what the trainer has now is not what was sent"
        )
    return metrics["push_bytes"]


@pytest.mark.parametrize(
    ("variant", "world", "parallel", "ranks", "dtype"),
    [
        ("qwen3-moe", 1, P(), 1, torch.float32),
        ("qwen3-moe", 4, P(tensor=2, sequence=True, expert=2), 2, torch.float32),
        # numbers that are cast on their way into the engine
        ("mixtral", 2, P(expert=2), 1, torch.bfloat16),
        pytest.param(
            "deepseek-v3",
            4,
            P(tensor=2, sequence=True, expert=4),
            1,
            torch.float32,
            marks=pytest.mark.ranks,
        ),
        pytest.param(
            "qwen2", 4, P(tensor=2, pipeline=2), 4, torch.float32, marks=pytest.mark.ranks
        ),
        pytest.param(
            "qwen3-tied",
            2,
            P(pipeline=2, virtual_pipeline=2),
            1,
            torch.float32,
            marks=pytest.mark.ranks,
        ),
        pytest.param("llama", 4, P(tensor=4), 2, torch.bfloat16, marks=pytest.mark.ranks),
    ],
)
def test_recorded_copies_are_bit_for_bit_what_the_loader_leaves(
    variant: str,
    world: int,
    parallel: ParallelConfig,
    ranks: int,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    run_ranks(world, replayed_body, save_tiny(tmp_path, variant), parallel, ranks, dtype)


def scaled(name: str, parameter: Tensor) -> None:
    """A loader that computes: whoever watches sees it."""
    if name == NORM:
        parameter.mul_(3.0)


def scaled_for_real(name: str, parameter: Tensor) -> None:
    """One that does so only where there are numbers: a rehearsal can't see it."""
    if name == NORM and not parameter.is_meta:
        parameter.mul_(3.0)


def own_ways_body(world: Any, folder: Path, after: Any) -> None:
    manager = build_manager(folder, P())
    disk = load_file(folder / "model.safetensors")
    engine = FusedEngine(0, 1, {name: tensor.shape for name, tensor in disk.items()})
    engine.after = after
    weights = EngineWeights(manager.shards(), engine, bucket_bytes=2**20)
    for version in range(3):
        weights.push(version=version)
        assert torch.equal(engine.parameters[NORM], disk[NORM] * 3.0)
        assert engine.by_loader == (disk.keys() if version == 0 else {NORM})


@pytest.mark.parametrize("after", [scaled, scaled_for_real])
def test_what_a_loader_does_besides_copying_stays_its_own_work(after: Any, tmp_path: Path) -> None:
    run_ranks(1, own_ways_body, save_tiny(tmp_path, "llama"), after)


def broken_body(world: Any, folder: Path, fault: str) -> str:
    """A replayed push that goes wrong on process 1, and the next one."""
    manager = build_manager(folder, P(expert=2))
    disk = load_file(folder / "model.safetensors")
    engine = FusedEngine(0, 1, {name: tensor.shape for name, tensor in disk.items()})
    weights = EngineWeights(manager.shards(), engine, bucket_bytes=2**20)
    for version in range(2):
        weights.push(version=version)
    real, fill = push.written, engine.fill

    def damaged(message: Tensor, layout: Any, version: int, slices: Any) -> Tensor:
        real(message, layout, version, slices)
        message[layout.places[3]] += 1
        return message

    def forgetful(name: str, filling: Any) -> None:
        if name != "model.layers.0.block_sparse_moe.experts.w13.weight":
            fill(name, filling)

    if world.rank == 1 and fault == "damaged":
        push.written = damaged
    if world.rank == 1 and fault == "forgotten":
        engine.fill = forgetful  # type: ignore[method-assign]
    with pytest.raises(EngineError) as caught:
        weights.push(version=2)
    assert engine.version is None, "half a push counts as a whole one"
    push.written, engine.fill = real, fill  # type: ignore[method-assign]
    weights.push(version=3)
    assert engine.version == 3
    assert all(each.intact for each in weights.checksums())
    return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "rank", "told"),
    [
        (
            "damaged",
            0,
            "block_sparse_moe.experts.3.w1.weight[0:96, 0:64] of push 2 came damaged from process 1",
        ),
        (
            "forgotten",
            1,
            "The engine left model.layers.0.block_sparse_moe.experts.w13.weight without its weights of push 2.",
        ),
    ],
)
def test_a_replay_that_breaks_off_leaves_no_engine_that_answers(
    fault: str, rank: int, told: str, tmp_path: Path
) -> None:
    saw = run_ranks(2, broken_body, save_tiny(tmp_path, "mixtral"), fault)
    assert told in saw[rank]
    assert saw[1 - rank] == "Push 2 failed on 1 other process(es); no engine has weights now."


def moved_body(world: Any, folder: Path) -> None:
    """A parameter that is given other memory, as `.data =` does, is found again; what was kept of
    the old is not sent.
    """
    manager = build_manager(folder, P())
    disk = load_file(folder / "model.safetensors")
    engine = FusedEngine(0, 1, {name: tensor.shape for name, tensor in disk.items()})
    weights = EngineWeights(manager.shards(), engine, bucket_bytes=2**20)
    for version in range(2):
        weights.push(version=version)
    for item in manager.bound:
        item.parameter.data = item.parameter.data * 2.0
    weights.push(version=2)
    assert torch.equal(engine.parameters[NORM], disk[NORM] * 2.0)
    assert torch.equal(
        engine._target("model.layers.0.mlp.up_proj.weight"),
        disk["model.layers.0.mlp.up_proj.weight"] * 2.0,
    )


def test_parameters_in_other_memory_are_pushed_from_there(tmp_path: Path) -> None:
    run_ranks(1, moved_body, save_tiny(tmp_path, "llama"))
