"""What remains of a world of one after its end, whatever that was."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.config import ParallelConfig
from rftmega.runtime.parallel import process_group
from tests.layouts import build_policy, rows_of
from tests.ranks import alone
from tests.tiny_models import save_tiny

ROWS = [[5, 9, 130, 2, 77], [3, 0]]


def failed(error: type[BaseException]) -> None:
    with process_group.start() as world:
        assert (world.rank, world.size, dist.get_world_size()) == (0, 1, 1)
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_world_of_one_leaves_no_group_behind_after_an_error(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NCCL a process whose groups stand did not end."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(error):
        failed(error)
    assert not dist.is_initialized()


def test_a_world_of_one_that_was_taken_down_within_ends_well() -> None:
    with process_group.start():
        dist.destroy_process_group()
    assert not dist.is_initialized()


def scored(world: Any, folder: Path) -> Tensor:
    logp: Tensor = build_policy(folder, ParallelConfig()).log_probs(rows_of(ROWS)).logp
    return logp


def test_worlds_of_one_with_models_follow_each_other_in_one_process(tmp_path: Path) -> None:
    """As the tests of a GPU do, where each process's start takes longer than its test."""
    folders = [save_tiny(tmp_path / variant, variant) for variant in ("qwen3", "qwen3-moe")]
    found = [alone(scored, folder) for folder in (*folders, *folders)]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_was_built_is_undone_in_a_world_of_one_before_its_group_is_gone(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    seen: list[bool] = []
    with pytest.raises(error), process_group.start() as world:
        with process_group.undone(world, lambda: seen.append(dist.is_initialized())):
            raise error
    assert seen == [True]


def test_of_several_processes_none_undoes_anything() -> None:
    """It might wait for the others, of which one is gone."""
    world = process_group.World(0, 2, 0, 2, torch.device("cpu"))
    with pytest.raises(ValueError), process_group.undone(world, lambda: pytest.fail("undone")):
        raise ValueError


def test_a_run_alone_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run in the process may have several ranks."""
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with process_group.start():
        assert os.environ["WORLD_SIZE"] == "1"
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(os.environ)
