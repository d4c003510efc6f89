import os
import subprocess
import sys

import pytest

from rftmega.runtime.parallel.private import private_files

PROGRAM = """
import os, subprocess, sys
from rftmega.runtime.parallel.private import keep_private
keep_private()
subprocess.run([sys.executable, "-c", "import os; print(oct(os.umask(0)))"])
"""


@pytest.mark.parametrize(
    ("given", "then"), [(0o022, "0o27"), (0o077, "0o77"), (0o002, "0o7"), (0, "0o7")]
)
def test_others_have_no_rights_and_the_group_those_that_it_had(given: int, then: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        umask=given,
        env=os.environ,
    )
    assert done.stdout.strip() == then


def now() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


@pytest.mark.parametrize(("before", "within"), [(0o022, 0o027), (0o077, 0o077), (0, 0o007)])
def test_files_of_a_run_are_private_and_those_after_it_as_before(before: int, within: int) -> None:
    os.umask(before)
    with private_files():
        assert now() == within
    assert now() == before


def test_files_after_a_run_that_failed_are_as_before() -> None:
    os.umask(0o022)
    with pytest.raises(KeyError), private_files():
        raise KeyError
    assert now() == 0o022
