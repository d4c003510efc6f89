"""What becomes of groups whose servers fail: the rows of tests/server_chaos.py."""

from pathlib import Path

import pytest

from tests.server_chaos import FAULTS, Fault, happened

QUICK = (
    "a host is cut off, and comes back before the next push",
    "a server hangs when weights come",
    "a server joins, and leaves again",
)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=[] if fault.name in QUICK else [pytest.mark.ranks])
        for fault in FAULTS
    ],
)
def test_each_group_ends_once_and_under_the_weights_that_it_names(
    fault: Fault, tmp_path: Path
) -> None:
    happened(fault, tmp_path)


def test_there_are_twenty_faults_and_all_that_are_quick_are_known() -> None:
    names = {fault.name for fault in FAULTS}
    assert len(names) >= 20 and names >= set(QUICK)
