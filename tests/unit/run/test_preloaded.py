"""What a launcher imports, and what the server that its ranks are forked from imports."""

import json
import subprocess
import sys

import pytest

from rftmega.run.local_launcher import FROZEN
from tests.e2e.conftest import ROOT

PROGRAM = """
import json, sys

def there():
    return [name for name in ("transformers", "megatron.core", "rftmega.run.placement") if name in sys.modules]

from rftmega.config import RunConfig
from rftmega.run import command_line, local_launcher, preflight
found = [there()]
slow = preflight.slow_modules(RunConfig())
if "server" in sys.argv:
    import rftmega.run.preloaded
    for module in slow:
        __import__(module)
    found.append(there())
print(json.dumps([*found, [*slow, *preflight.slow_modules(RunConfig(backend="fsdp"))]]))
"""


@pytest.mark.parametrize("server", [False, pytest.param(True, marks=pytest.mark.ranks)])
def test_the_launcher_imports_no_models_and_its_server_all_that_ranks_need(server: bool) -> None:
    """Each rank would import transformers and Megatron anew otherwise, some ten seconds. The
    `server` imports them, which takes as long.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *["server"] * server],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    launcher, *imported, slow = json.loads(done.stdout.splitlines()[-1])
    assert launcher == []
    assert imported == [["transformers", "megatron.core", "rftmega.run.placement"]] * server
    assert {"rftmega.backends.megatron", "rftmega.backends.fsdp.backend"} <= set(slow)


def test_collections_in_a_rank_do_not_look_at_its_imports() -> None:
    code = f"import gc; import {FROZEN}; print(gc.get_freeze_count(), gc.isenabled())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    frozen, enabled = done.stdout.split()
    assert int(frozen) > 1000
    assert enabled == "True"
