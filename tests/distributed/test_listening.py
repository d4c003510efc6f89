"""Who can reach the processes of a run that `--processes` starts."""

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import ROOT

WORK = """
import json, os, psutil
from rftmega.runtime.parallel import process_group

def work(launcher):
    with process_group.start():
        held = [held for pid in (os.getpid(), launcher) for held in psutil.Process(pid).net_connections("inet")]
        print(json.dumps([one.laddr.ip for one in held if one.status == psutil.CONN_LISTEN]), flush=True)
"""
PROGRAM = """
import os
from rftmega.run import local_launcher
from work_of_a_rank import work

if __name__ == "__main__":
    local_launcher.launch(1, work, os.getpid(), preload=[])
"""


def test_a_run_on_one_host_listens_on_loopback_only(tmp_path: Path) -> None:
    (tmp_path / "work_of_a_rank.py").write_text(WORK)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    listening = json.loads(done.stdout.splitlines()[-1])
    assert len(listening) >= 2, done  # the launcher's store, and gloo's
    assert set(listening) == {"127.0.0.1"}
