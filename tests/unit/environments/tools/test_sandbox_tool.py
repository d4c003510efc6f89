import asyncio
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rftmega.config.options.tools import SandboxTool, ToolLimits
from rftmega.core.errors import ConfigError, InfrastructureFault
from rftmega.environments.tools import sandbox_tool
from rftmega.environments.tools.sandbox_tool import SandboxSession, SandboxTools
from rftmega.environments.tools.tool_runner import OpenTools, ToolReply, ToolRunner
from tests.unit.environments.tools.tool_calls import in_rollout

OPTIONS = SandboxTool(python=True, seconds=20.0, memory_mib=512)
# writes to every pipe that the interpreter has
FORGED = """
import os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b'0 well\\nwell\\n{"undecided": "x", "text": "forged", "failed": false, "ended": null}\\n')
    except OSError:
        pass
"""


def said(*pieces: str, options: SandboxTool = OPTIONS) -> list[ToolReply]:
    """Returns the replies to pieces of code in one rollout."""

    async def work(runner: ToolRunner) -> list[ToolReply]:
        return [await runner.call("python", {"code": code}) for code in pieces]

    return in_rollout(work, SandboxTools(options))


def texts(*pieces: str) -> list[str]:
    return [reply.text for reply in said(*pieces)]


def boxes() -> set[str]:
    """Returns the folders of sandboxes."""
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("rftmega-code-")}


def test_names_stay_and_a_last_expression_is_shown() -> None:
    found = texts(
        "x = 3", "x + 1", "print('a'); x * 2", "_ + 1", "None", "import math\nmath.pi > 3"
    )
    assert found == ["", "4\n", "a\n6\n", "7\n", "", "True\n"]


def test_an_exception_comes_back_as_a_traceback_of_the_code_alone() -> None:
    deep = "def f(n):\n    return f(n + 1)\nf(0)"
    zero, broken, endless, left, after = said(
        "print('a')\n1 / 0", "x = (", deep, "exit(3)", "'there'"
    )
    assert zero.failed and [line for line in zero.text.splitlines() if "^" not in line] == [
        "error: a",
        "Traceback (most recent call last):",
        '  File "<call 1>", line 2, in <module>',
        "    1 / 0",
        "ZeroDivisionError: division by zero",
    ]
    assert broken.failed and "SyntaxError: '(' was never closed" in broken.text
    assert endless.failed and "RecursionError" in endless.text and len(endless.text) < 600
    assert left.failed and "SystemExit: 3" in left.text
    assert (after.text, after.failed) == ("'there'\n", False)


def test_what_programs_print_and_what_goes_to_standard_error_comes_back() -> None:
    code = "import os, sys\nos.system('echo one; echo two >&2')\nsys.stderr.write('three')\nNone"
    assert texts(code) == ["one\ntwo\nthree"]


def test_code_may_ruin_its_streams_and_the_next_call_has_new_ones() -> None:
    found = texts(
        "import sys\nsys.stdout = None", "1", "sys.stdout.close()", "2", "print('\\ud800')"
    )
    assert found == ["", "1\n", "", "2\n", "?\n"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "import os\nprint('a')\nos._exit(3)",
            "a\n\n[the interpreter is gone, it ended with exit status 3",
        ),
        pytest.param(
            "import ctypes\nctypes.string_at(0)",
            "it was ended by SIGSEGV",
            marks=pytest.mark.ranks,
        ),
    ],
)
def test_an_interpreter_that_ends_is_the_models_failure_and_the_next_call_begins_anew(
    code: str, says: str
) -> None:
    _, ended, lost = said("x = 1", code, "x")
    assert ended.failed and says in ended.text and "all names are lost" in ended.text
    assert lost.failed and "NameError: name 'x' is not defined" in lost.text


def test_a_call_over_its_time_kills_the_interpreter_and_says_so() -> None:
    late, after = said("print('a')\nwhile True: pass", "3", options=SandboxTool(True, 1.0))
    assert late.failed and late.text.startswith("error: a\n")
    assert "it took longer than 1 s: all names are lost" in late.text
    assert (after.text, after.failed) == ("3\n", False)


def test_memory_over_the_limit_is_an_error_of_the_code() -> None:
    full, after = said(f"x = bytearray({1 << 30})", "1")
    assert full.failed and "MemoryError" in full.text
    assert after.text == "1\n"


def test_processor_time_is_limited_over_all_calls() -> None:
    options = SandboxTool(True, seconds=60.0, processor_seconds=1.0)
    (spent,) = said("while True: pass", options=options)
    assert spent.failed and "it was ended by SIGKILL" in spent.text


def test_a_flood_of_output_is_cut_and_holds_nothing_up() -> None:
    flood, after = said("for i in range(200_000): print('x' * 99)", "1")
    assert not flood.failed and "left out" in flood.text and len(flood.text) < 10_000
    assert after.text == "1\n"


@pytest.mark.parametrize("namespaces", [True, False])
def test_code_is_confined_as_that_of_the_reward_is(namespaces: bool) -> None:
    toolset = SandboxTools(OPTIONS)
    asyncio.run(toolset.open())
    toolset.namespaces = namespaces and toolset.namespaces
    code = """
import os, socket
found = []
for path in ("/root", "/work", "/home", "/etc/passwd"):
    try:
        found += os.listdir(path) if os.path.isdir(path) else [open(path).read()]
    except OSError:
        pass
try:
    socket.create_connection(("127.0.0.1", 9), timeout=1)
except PermissionError:
    pass
except OSError as error:
    found += [] if error.errno in (101, 111) else [error]
[name for name in found if "rftmega.py" in name or "root:" in name], os.getuid(), os.environ.get("HOME") != "/root"
"""

    async def work(runner: ToolRunner) -> ToolReply:
        return await runner.call("python", {"code": code})

    reply = in_rollout(work, toolset)
    assert not reply.failed, reply.text
    leaked, user, away = eval(reply.text)
    assert (leaked, away) == ([], True)
    assert user != 0


def test_code_that_writes_to_every_pipe_forges_no_failure_of_the_sandbox() -> None:
    goes_on = "import time\ntime.sleep(0.5)\nprint('own')"
    forged, *after = said(FORGED + goes_on, "1", "x = 5", "x")
    assert [reply.text for reply in (forged, *after)] == ["own\n", "1\n", "", "5\n"]


def test_nothing_is_left_of_a_rollout() -> None:
    before = boxes()
    found = said(
        "import subprocess\nsubprocess.Popen(['sleep', '1000'])\nopen('file', 'w').write('x')"
    )
    assert not found[0].failed
    assert boxes() <= before


def test_a_rollout_that_is_broken_off_ends_its_interpreter() -> None:
    processes: list[asyncio.subprocess.Process] = []

    class Seen(SandboxSession):
        async def _started(self) -> asyncio.subprocess.Process:
            processes.append(await super()._started())
            return processes[-1]

    class Tools(SandboxTools):
        def session(self, task: Any = None) -> SandboxSession:
            return Seen(self)

    async def work(runner: ToolRunner) -> None:
        await runner.call("python", {"code": "x = 1"})
        task = asyncio.create_task(runner.call("python", {"code": "while True: pass"}))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_rollout(work, Tools(OPTIONS))
    assert [process.returncode for process in processes] == [0]


def test_a_sandbox_that_dies_is_a_fault_and_the_next_call_starts_another() -> None:
    async def work() -> ToolReply:
        tools = OpenTools([SandboxTools(OPTIONS)], ToolLimits())
        await tools.open()
        async with tools.runner() as runner:
            await runner.call("python", {"code": "x = 1"})
            session: Any = runner._sessions[0]
            os.killpg(session._process.pid, signal.SIGKILL)
            with pytest.raises(InfrastructureFault, match="ended without a word"):
                await runner.call("python", {"code": "x"})
            reply = await runner.call("python", {"code": "2"})
        await tools.close()
        return reply

    assert asyncio.run(work()).text == "2\n"


@pytest.mark.parametrize(
    ("told", "kind", "says"),
    [
        ('{"undecided": "no memory", "lacks": {}}', InfrastructureFault, "no memory"),
        ('{"refused": "no namespaces", "lacks": {}}', ConfigError, "no namespaces"),
    ],
)
def test_a_machine_without_a_sandbox_is_told(
    told: str, kind: type[Exception], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "rftmega" / "sandbox"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(f"print({told!r}, flush=True)")
    monkeypatch.setattr(sandbox_tool, "ROOT", tmp_path)
    with pytest.raises(kind, match=says):
        asyncio.run(SandboxTools(OPTIONS).open())


def test_code_that_ends_its_own_call_early_is_heard_in_the_next() -> None:
    stolen = """
import os, sys
frame = sys._getframe()
while "request" not in frame.f_locals:
    frame = frame.f_back
word = frame.f_locals["request"]["word"]
for descriptor in range(3, 64):
    try:
        os.write(descriptor, (word + " well\\n").encode())
    except OSError:
        pass
import time
time.sleep(0.5)  # so that the forged end is likely to be heard by itself
raise ValueError
"""
    _, _, *after = said(stolen, "1", "x = 5", "x")
    assert [reply.text for reply in after] == ["", "5\n"]
