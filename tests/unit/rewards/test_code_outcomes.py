"""Whatever a sandbox says that is no outcome: never a plain 0."""

import contextlib
import copy
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rftmega.core.errors import RewardError
from rftmega.rewards import code
from rftmega.rewards.code import CodePart
from rftmega.rewards.part import Answer, Undecided

TESTS = Answer("def f(n):\n    return n * n\n", json.dumps({"tests": "assert f(2) == 4"}))
PROGRAM = Answer("print(3)", json.dumps({"inputs": [""], "outputs": ["3"]}))
LACKS = {"namespaces": False, "filter": False, "files": False}


@pytest.fixture(scope="module")
def tested() -> CodePart:
    found = CodePart(workers=1, seconds=20.0, memory_mib=512)
    found.test()
    return found


@pytest.fixture
def part(tested: CodePart) -> CodePart:
    return copy.copy(tested)


def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> None:
    """Another program in the place of the sandbox."""
    package = tmp_path / "rftmega"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sandbox.py").write_text(
        f"import os, signal, sys\nsys.stdin.readline()\n{program}\n"
    )
    monkeypatch.setattr(
        code,
        "_environment",
        lambda plain=code._environment: plain() | {"PYTHONPATH": str(tmp_path)},
    )


NO_OUTCOME = {
    "nothing": "",
    "another status": "raise SystemExit(3)",
    "half a line": "os.write(1, b'{\"passed\": tr')",
    "half a line that is JSON but has no end": f"os.write(1, {json.dumps({'passed': True, 'lacks': LACKS}).encode()!r})",
    "a whole line that is cut": "os.write(1, b'{\"passed\": tr\\n')",
    "no verdict": f"print({json.dumps({'lacks': LACKS})!r})",
    "a verdict of the other kind": f"print({json.dumps({'lacks': LACKS, 'failed': None})!r})",
    "null": f"print({json.dumps({'lacks': LACKS, 'passed': None, 'outputs': None})!r})",
    "no word on layers": 'print(\'{"passed": false, "outputs": []}\')',
    "a list": "print('[]')",
}


@pytest.mark.parametrize("answer", [TESTS, PROGRAM], ids=["tests", "program"])
def test_a_sandbox_without_an_outcome_is_an_error_and_no_score(
    part: CodePart, answer: Answer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, tmp_path, "")
    scored = {}
    for name, program in NO_OUTCOME.items():
        (tmp_path / "rftmega" / "sandbox.py").write_text(
            f"import os, signal, sys\nsys.stdin.readline()\n{program}\n"
        )
        with contextlib.suppress(RewardError):
            scored[name] = part([answer])
    assert scored == {}


@pytest.mark.parametrize("answer", [TESTS, PROGRAM], ids=["tests", "program"])
def test_a_sandbox_that_a_signal_ended_decides_nothing(
    part: CodePart,
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand_in(monkeypatch, tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    with caplog.at_level(logging.WARNING):
        assert [type(found) for found in part([answer])] == [Undecided]
    assert "SIGKILL" in caplog.text


@pytest.mark.parametrize("namespaces", [True, pytest.param(False, marks=pytest.mark.ranks)])
@pytest.mark.parametrize("answer", [TESTS, PROGRAM], ids=["tests", "program"])
def test_a_sandbox_that_could_not_be_set_up_decides_nothing(
    part: CodePart,
    answer: Answer,
    namespaces: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    broken = "from rftmega.sandbox import confine, __main__ as box\ndef fails(*_, **__): raise OSError('no')\n"
    broken += "confine.drop_privileges = fails\nbox.main()"
    (tmp_path / "start.py").write_text(broken)
    started = subprocess.Popen

    def start(command: list[str], **named: object) -> object:
        return started([*command[:3], str(tmp_path / "start.py")], **named)  # type: ignore[call-overload]

    monkeypatch.setattr(code.subprocess, "Popen", start)
    part.namespaces = part.namespaces and namespaces
    assert [type(found) for found in part([answer])] == [Undecided]


def test_an_answers_own_end_is_a_plain_zero(part: CodePart) -> None:
    part.seconds = 1.0
    ends = (
        "raise MemoryError",
        "while True: pass",
        "import os\nos.kill(os.getpid(), 9)",
        "import os\nos._exit(1)",
        "x = [0] * 10**11",
    )
    for label in (TESTS.label, PROGRAM.label):
        assert [type(found) for found in part([Answer(end, label) for end in ends])] == [
            float
        ] * len(ends)


def test_a_sandbox_that_is_killed_while_an_answer_runs_decides_nothing(part: CodePart) -> None:
    found: list[float] = []
    sleeps = Answer("import time\ntime.sleep(99)", TESTS.label)
    judge = threading.Thread(target=lambda: found.extend(part([sleeps])))
    judge.start()
    end = time.monotonic() + 60
    while not (running := supervisors()) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in running:
        os.kill(pid, 9)
    judge.join(60)
    assert [type(each) for each in found] == [Undecided]


def supervisors() -> list[int]:
    """Sandboxes that are children of this process."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
            parent = int(Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if (
            parent == os.getpid()
            and b"rftmega.sandbox" in words
            and words[0] == sys.executable.encode()
        ):
            found.append(int(pid))
    return found
