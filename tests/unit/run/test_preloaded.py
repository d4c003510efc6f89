"""What a launcher imports, and what the server that its ranks are forked from imports."""

import json
import subprocess
import sys

from tests.e2e.conftest import ROOT

PROGRAM = """
import json, sys

def there():
    return [name for name in ("transformers", "megatron.core", "rftmega.run.placement") if name in sys.modules]

from rftmega.config import RunConfig
from rftmega.run import command_line, local_launcher, preflight
found = [there()]
import rftmega.run.preloaded
for module in preflight.slow_modules(RunConfig()):
    __import__(module)
found.append(there())
print(json.dumps([*found, preflight.slow_modules(RunConfig(backend="fsdp"))]))
"""


def test_the_launcher_imports_no_models_and_its_server_all_that_ranks_need() -> None:
    """Each rank would import transformers and Megatron anew otherwise, some ten seconds."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=ROOT
    )
    launcher, server, of_fsdp = json.loads(done.stdout.splitlines()[-1])
    assert launcher == []
    assert server == ["transformers", "megatron.core", "rftmega.run.placement"]
    assert "rftmega.backends.fsdp.backend" in of_fsdp
