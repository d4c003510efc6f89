"""What the processes of a run find out about each other's hosts."""

import time
from pathlib import Path
from typing import Any

import pytest

from rftmega.core.errors import NodeError
from rftmega.runtime.parallel import nodes
from tests.ranks import on_ranks, run_ranks


@on_ranks(2)
def test_hosts_that_fit_are_let_through_and_measured(world: Any) -> None:
    nodes.check_nodes(world, {"/tmp": 0})
    assert nodes._bandwidth() > 0


def odd_one(world: Any, folder: Path) -> str:
    """The second rank's clock is a minute ahead, and its sources are others."""
    if world.rank == 1:
        now, own = time.time, nodes.versions()
        nodes.time.time = lambda: now() + 60  # type: ignore[attr-defined]
        nodes.versions = lambda: own | {"rftmega": "other"}  # type: ignore[assignment]
    with pytest.raises(NodeError) as raised:
        nodes.check_nodes(world, {str(folder): 0})
    return str(raised.value)


def test_all_ranks_raise_the_same_error_and_it_names_the_odd_one(tmp_path: Path) -> None:
    first, second = run_ranks(2, odd_one, tmp_path)
    assert first == second
    assert "rank 1 on" in first and "has rftmega other" in first
    assert "has a clock 60 s ahead" in first
