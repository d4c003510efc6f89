"""The planned push on real ranks: every engine's rank gets exactly what its loader reads, moved
once, or nothing counts.
"""

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rftmega.config import ParallelConfig
from rftmega.core.errors import EngineError
from rftmega.core.shards import Box
from rftmega.weights import EngineWeights, push
from rftmega.weights.message import Layout
from tests.block_engine import BlockEngine
from tests.layouts import build_manager
from tests.ranks import RankFailure, run_ranks
from tests.tiny_models import save_tiny
from tests.tiny_vision import KINDS, by_matrix, save_tiny_vision

P = ParallelConfig


def push_body(world: Any, folder: Path, parallel: ParallelConfig, ranks: int) -> Any:
    manager = build_manager(folder, parallel)
    disk = by_matrix(load_file(folder / "model.safetensors"))
    for bucket_bytes in (2**30, 10_000):
        engine = BlockEngine(world.rank % ranks, ranks)
        weights = EngineWeights(manager.shards(), engine, bucket_bytes=bucket_bytes)
        # weights that change between pushes, and are the folder's in the end
        for version, factor in ((7, 0.5), (8, 2.0)):
            with torch.no_grad():
                for item in manager.bound:
                    item.parameter.mul_(factor)
            engine.loaded.clear()
            metrics = weights.push(version=version)
            assert engine.version == version
            assert engine.loaded.keys() == disk.keys()
            for name, tensor in disk.items():
                assert torch.equal(
                    engine.loaded[name], engine.block(name, tensor if factor > 1 else tensor / 2)
                ), name
    return metrics["push_bytes"], metrics["push_bytes_least"], metrics["push_ratio"]


PAIRS = [
    pytest.param("llama", 4, P(tensor=2, pipeline=2), 1, marks=pytest.mark.ranks),
    # key-value heads fewer than ranks on both sides
    pytest.param("llama", 4, P(tensor=4), 4, marks=pytest.mark.ranks),
    pytest.param("qwen2", 4, P(tensor=4), 1, marks=pytest.mark.ranks),
    ("qwen2", 4, P(tensor=2), 4),
    ("qwen3-tied", 4, P(pipeline=2, virtual_pipeline=2), 2),
    pytest.param(
        "llama-tied-llama3-rope", 4, P(pipeline=2, first_stage_layers=1), 2, marks=pytest.mark.ranks
    ),
    pytest.param("qwen3-moe", 4, P(tensor=2, sequence=True, expert=2), 2, marks=pytest.mark.ranks),
    pytest.param(
        "deepseek-v3", 4, P(tensor=2, sequence=True, expert=4), 1, marks=pytest.mark.ranks
    ),
    ("phi3", 4, P(tensor=4), 2),  # parts of one tensor, of which each side has other rows
    pytest.param("phi3", 4, P(tensor=2, pipeline=2), 4, marks=pytest.mark.ranks),
    pytest.param("olmo2", 4, P(tensor=2, pipeline=2), 2, marks=pytest.mark.ranks),
    *(
        pytest.param(variant, 4, P(tensor=2, pipeline=2), 2, marks=pytest.mark.ranks)
        for variant in ("arcee", "smollm3-window", "granite", "exaone4", "hunyuan", "gemma3")
    ),
    pytest.param("seed-oss", 4, P(tensor=4), 2, marks=pytest.mark.ranks),
    pytest.param("glm4-moe", 4, P(tensor=2, sequence=True, expert=2), 2, marks=pytest.mark.ranks),
    pytest.param("qwen3_vl", 4, P(tensor=2, pipeline=2), 2, marks=pytest.mark.ranks),
    # its tower is on the first stage, whole
    ("qwen3_vl_moe", 4, P(tensor=2, sequence=True, pipeline=2, expert=2), 2),
    pytest.param("llama", 8, P(tensor=2, pipeline=2), 4, marks=pytest.mark.ranks),
    pytest.param(
        "qwen3", 8, P(tensor=2, pipeline=2, virtual_pipeline=2), 2, marks=pytest.mark.ranks
    ),
]
"""(variant, processes, trainer's layout, engine's tensor-parallel size)"""


@pytest.mark.parametrize(("variant", "world", "parallel", "ranks"), PAIRS)
def test_engines_get_what_they_read_and_no_byte_more_is_moved(
    variant: str, world: int, parallel: ParallelConfig, ranks: int, tmp_path: Path
) -> None:
    folder = (save_tiny_vision if variant in KINDS else save_tiny)(tmp_path, variant)
    for moved, least, ratio in run_ranks(world, push_body, folder, parallel, ranks):
        assert moved == least > 0
        assert ratio == 1


def test_nothing_moves_where_trainer_and_engine_cut_alike(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", vocab_size=128)
    for moved, least, _ in run_ranks(4, push_body, folder, P(tensor=2), 2):
        assert moved == least == 0


def faulty_body(world: Any, folder: Path, fault: str) -> Any:
    """What each process saw of a push that went wrong, and of the next one."""
    manager = build_manager(folder, P(tensor=2, pipeline=2))
    engine = BlockEngine(0, 1)
    weights = EngineWeights(manager.shards(), engine, bucket_bytes=20_000)
    assert len(weights.buckets) > 4
    weights.push(version=0)
    restore = plant(fault, engine, weights) if world.rank == 1 else lambda: None
    with pytest.raises(EngineError) as caught:
        weights.push(version=1)
    assert engine.version is None, "half a push counts as a whole one"
    restore()
    weights.push(version=2)
    assert engine.version == 2
    disk = load_file(folder / "model.safetensors")
    assert all(torch.equal(engine.loaded[name], tensor) for name, tensor in disk.items())
    return str(caught.value)


def shifted(box: Box) -> Box:
    """One row before."""
    (start, stop), *rest = box
    return ((start - 1, stop - 1), *rest)


def plant(fault: str, engine: BlockEngine, weights: EngineWeights) -> Any:
    """Breaks something on this process; returns what mends it."""
    load = engine.load_weights
    if fault == "the loader fails half-way":

        def fails(named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
            engine.invalidate()
            for _, (name, tensor) in zip(range(9), named_tensors, strict=False):
                engine.loaded[name] = torch.clone(tensor)
            raise EngineError("no memory left for this tensor")

        engine.load_weights = fails  # type: ignore[method-assign]
    if fault == "the loader stops early":

        def stops(named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
            tensors = list(weights.needs)
            for _ in zip(range(len(tensors) - 1), named_tensors, strict=False):
                pass
            engine.version = version

        engine.load_weights = stops  # type: ignore[method-assign]
    if fault == "another tensor is asked for":
        bucket = weights.buckets[3]
        for source in bucket.receives:
            dropped = bucket.receives[source]
            bucket.receives[source] = Layout(
                [each._replace(box=shifted(each.box)) for each in dropped.slices]
            )
            return lambda: bucket.receives.update({source: dropped})
    return lambda: setattr(engine, "load_weights", load)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("the loader fails half-way", "no memory left for this tensor"),
        (
            "the loader stops early",
            "The engine stopped reading before the last tensor of the push.",
        ),
        ("another tensor is asked for", "it did not when the push was planned"),
    ],
)
def test_where_one_engine_fails_none_answers_and_the_push_can_be_repeated(
    fault: str, told: str, tmp_path: Path
) -> None:
    saw = run_ranks(4, faulty_body, save_tiny(tmp_path, "llama"), fault)
    assert told in saw[1]
    for rank in (0, 2, 3):
        assert saw[rank] == "Push 1 failed on 1 other process(es); no engine has weights now."


def damaged_body(world: Any, folder: Path, fault: str) -> Any:
    """Process 1 sends something else than it should, once."""
    import rftmega.weights.push as push

    manager = build_manager(folder, P(tensor=2))
    engine = BlockEngine(0, 1)
    weights = EngineWeights(manager.shards(), engine, bucket_bytes=20_000)
    real = push.written

    def damaged(message: Tensor, moves: Any, version: int, slice_of: Any) -> Tensor:
        if fault == "another push":
            return real(message, moves, version - 1, slice_of)
        real(message, moves, version, slice_of)
        at = message.numel() - 64  # of the last slice
        if fault == "a byte":
            message[at] += 1
        if fault == "words swapped":
            words = message[at : at + 16].view(torch.int64)
            words.copy_(words.flip(0))
        if fault == "rows swapped":
            rows = message[at - 512 : at].view(2, 256)  # of 64 numbers
            rows.copy_(rows.flip(0))
        return message

    if world.rank == 1:
        push.written = damaged
    with pytest.raises(EngineError) as caught:
        weights.push(version=4)
    push.written = real
    assert engine.version is None
    weights.push(version=5)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        pytest.param("a byte", "of push 4 came damaged from process 1", marks=pytest.mark.ranks),
        pytest.param(
            "words swapped", "of push 4 came damaged from process 1", marks=pytest.mark.ranks
        ),
        ("rows swapped", "of push 4 came damaged from process 1"),
        ("another push", "Process 1 sent push 3 while this one takes push 4"),
    ],
)
def test_what_does_not_arrive_as_it_was_sent_is_refused(
    fault: str, told: str, tmp_path: Path
) -> None:
    assert told in run_ranks(2, damaged_body, save_tiny(tmp_path, "llama"), fault)[0]


def killed_body(world: Any, folder: Path, victim: int, after: int, told: Path) -> None:
    """A process is gone in the middle of a push: the others see an error, and their engines have no
    weights.
    """
    manager = build_manager(folder, P(tensor=2))
    engine = BlockEngine(0, 1)
    weights = EngineWeights(manager.shards(), engine, bucket_bytes=10_000)
    weights.push(version=0)
    if world.rank == victim:
        if after < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        load = engine.block
        left = iter(range(after))

        def dies(name: str, tensor: Tensor) -> Tensor:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return load(name, tensor)

        engine.block = dies  # type: ignore[method-assign]
    try:
        weights.push(version=1)
    except EngineError as error:
        assert engine.version is None
        told.write_text(str(error))


@pytest.mark.parametrize(
    ("victim", "after"),
    [
        (1, -1),
        pytest.param(0, 0, marks=pytest.mark.ranks),
        (0, 12),
        pytest.param(1, 5, marks=pytest.mark.ranks),
        pytest.param(1, 30, marks=pytest.mark.ranks),
    ],
)
def test_a_process_that_dies_before_or_in_a_push_leaves_no_engine_that_answers(
    victim: int, after: int, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    with pytest.raises(RankFailure, match=f"rank {victim} died|rank {1 - victim} raised"):
        run_ranks(2, killed_body, save_tiny(tmp_path, "llama"), victim, after, told)
    assert "Push 1 broke off: a process is gone" in told.read_text()


def short_of_memory_body(world: Any, folder: Path, told: Path) -> None:
    manager = build_manager(folder, P(tensor=2))
    engine = BlockEngine(0, 1)
    weights = EngineWeights(manager.shards(), engine, bucket_bytes=10_000)
    weights.push(version=0)
    if world.rank == 1:

        def nothing_left(*given: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        push.message_for = nothing_left  # type: ignore[assignment]
    try:
        weights.push(version=1)
    except Exception as error:
        assert engine.version is None
        told.with_name(f"told{world.rank}").write_text(f"{type(error).__name__}: {error}")
        raise


def test_a_process_without_memory_for_a_push_says_so_and_not_that_another_is_gone(
    tmp_path: Path,
) -> None:
    with pytest.raises(RankFailure, match="OutOfMemoryError"):
        run_ranks(2, short_of_memory_body, save_tiny(tmp_path, "llama"), tmp_path / "told")
    assert (
        tmp_path / "told1"
    ).read_text() == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def test_a_tensor_that_no_engine_reads_is_refused_before_the_first_push(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(1, unread_body, save_tiny(tmp_path, "llama"))
    assert "No engine reads all of model.norm.weight (64,), which the policy has" in str(
        caught.value
    )


def unread_body(world: Any, folder: Path) -> None:
    class Forgetful(BlockEngine):
        def blocks(self, name: str, tensor: Tensor) -> list[Tensor]:
            unread = name == "model.norm.weight"
            return [torch.empty(0)] if unread else super().blocks(name, tensor)

    EngineWeights(build_manager(folder, P()).shards(), Forgetful(0, 1), bucket_bytes=2**20)
