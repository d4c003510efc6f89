"""What remains of a world of one after an error."""

import pytest
import torch.distributed as dist

from rftmega.parallel import process_group


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_world_of_one_leaves_no_group_behind_after_an_error(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NCCL a process whose groups stand did not end."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(error), process_group.start() as world:
        assert (world.rank, world.size, dist.get_world_size()) == (0, 1, 1)
        raise error
    assert not dist.is_initialized()


def test_a_world_of_one_that_was_taken_down_within_ends_well() -> None:
    with process_group.start():
        dist.destroy_process_group()
    assert not dist.is_initialized()
