import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, subprocess, sys
from rftmega.parallel.private import keep_private
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
