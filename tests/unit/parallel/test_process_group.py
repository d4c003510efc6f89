"""What remains of a world of one after its end, whatever that was."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.config import ParallelConfig
from rftmega.parallel import process_group
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
