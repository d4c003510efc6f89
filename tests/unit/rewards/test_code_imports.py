"""What an answer imports is there, wherever Python lies; where it can't be, the run is refused."""

import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from rftmega.core.errors import RewardError
from rftmega.rewards import code
from rftmega.rewards.code import CodePart
from rftmega.rewards.part import Answer

LATE = "heapq, string, decimal, fractions, datetime, statistics, queue, csv"
LABEL = json.dumps({"tests": "assert f(2) == 4"})
NOT_NEEDED = (
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "ensurepip",
    "lib2to3",
    "tkinter",
    "config-*",
    "*.a",
)


def part(namespaces: bool | None) -> CodePart:
    found = CodePart(workers=1, seconds=60.0, memory_mib=1024)
    found.namespaces = namespaces
    return found


def imports(names: str) -> Answer:
    return Answer(f"import {names}\ndef f(n):\n    return n * n\n", LABEL)


@pytest.mark.parametrize("namespaces", [None, pytest.param(False, marks=pytest.mark.ranks)])
def test_what_answers_import_is_there_numpy_with_it(namespaces: bool | None) -> None:
    assert part(namespaces)(
        [imports(f"{LATE}, numpy.linalg"), imports("json.tool, email.message")]
    ) == [1.0, 1.0]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python's library, open to all, below a folder that is root's alone."""
    before = os.umask(0o022)
    closed = tmp_path_factory.mktemp("closed")
    closed.chmod(0o700)
    library = Path(sysconfig.get_path("stdlib"))
    target = closed / "python" / library.relative_to(sys.base_prefix)
    shutil.copytree(library, target, ignore=shutil.ignore_patterns(*NOT_NEEDED))
    os.umask(before)
    return target


@pytest.fixture
def moved(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = str(copied.parents[1])
    monkeypatch.setattr(
        code, "_environment", lambda plain=code._environment: plain() | {"PYTHONHOME": home}
    )
    return copied


@pytest.mark.skipif(os.getuid() != 0, reason="only root's sandbox runs answers as another user")
@pytest.mark.parametrize("namespaces", [None, False])
def test_a_python_below_a_closed_folder_is_readable_inside(
    moved: Path, namespaces: bool | None
) -> None:
    assert part(namespaces)([imports(LATE)]) == [1.0]
    reads = f"open({str(moved.parents[2] / 'secret')!r}).close()\n"
    (moved.parents[2] / "secret").write_text("no")
    (moved.parents[2] / "secret").chmod(0o644)
    climbs = "import os\nfor n in range(3, 9):\n    try: print(os.listdir(f'/proc/self/fd/{n}/..'))\n    except OSError: pass\n"
    assert part(namespaces)([Answer(reads + imports("re").response, LABEL)]) == [0.0], (
        "the folder itself stays closed"
    )
    program = json.dumps({"inputs": [""], "outputs": [""]})
    assert part(namespaces)([Answer(climbs, program)]) == [1.0], (
        "nor does a descriptor lead out of Python's folder"
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root's sandbox runs answers as another user")
@pytest.mark.parametrize("namespaces", [None, pytest.param(False, marks=pytest.mark.ranks)])
def test_a_module_that_an_answer_could_not_read_is_refused_with_its_path(
    moved: Path, namespaces: bool | None
) -> None:
    (moved / "heapq.py").chmod(0o600)
    for compiled in (moved / "__pycache__").glob("heapq.*"):
        compiled.unlink()
    try:
        with pytest.raises(
            RewardError,
            match=rf"heapq: PermissionError.*{moved}/heapq.py \(mode 0600\).*chmod o\+rX",
        ):
            part(namespaces)([imports("re")])
    finally:
        (moved / "heapq.py").chmod(0o644)


@pytest.mark.skipif(os.getuid() != 0, reason="only root's sandbox runs answers as another user")
def test_a_trainer_whose_new_files_are_private_runs_answers_all_the_same(moved: Path) -> None:
    before = os.umask(0o077)
    try:
        assert part(None)([imports(LATE)]) == [1.0]
    finally:
        os.umask(before)
