"""For every test."""

import gc
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.parts import NEW, chosen_part, parts_of

settings.register_profile("rftmega", deadline=None)  # a timing never decides a test
settings.load_profile("rftmega")

# what a launcher tells its ranks
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_TOLD = {name: os.environ[name] for name in LAUNCHED if name in os.environ}


TEMPORARY = "RFTMEGA_TESTS_TEMPORARY"  # where workers have their folders for temporary files


def pytest_configure(config: pytest.Config) -> None:
    """Only tests marked gpu see a GPU: all others are written for a CPU, with more ranks than a
    host has devices. Each worker has a folder for temporary files.
    """
    if Path("/proc/driver/nvidia").exists() and config.getoption("markexpr").strip() != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if hasattr(config, "workerinput"):  # what a test leaves behind is not another worker's
        folder = Path(os.environ.pop(TEMPORARY)) / config.workerinput["workerid"]
        folder.mkdir()
        folder.chmod(0o1777)
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        return
    if getattr(config.option, "numprocesses", None):
        os.environ[TEMPORARY] = tempfile.mkdtemp(prefix="tests-")
        os.chmod(os.environ[TEMPORARY], 0o755)
    if config.getoption("--record-durations"):
        config.pluginmanager.register(Recorder(durations_file(config)))


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()
    if not hasattr(config, "workerinput") and TEMPORARY in os.environ:
        shutil.rmtree(os.environ.pop(TEMPORARY), ignore_errors=True)


DURATIONS = Path(__file__).with_name("durations.json")  # file of tests -> seconds it took last
RANKS = Path(__file__).with_name("durations_of_ranks.json")  # the same of its tests marked ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help=f"write {DURATIONS.name}, for `make test`, or {RANKS.name}, for `make ranks`",
    )
    parser.addoption("--part", default="1/1", help="the files of one part of several, such as 2/3")


def durations_file(config: pytest.Config) -> Path:
    return RANKS if config.getoption("markexpr").strip() == "ranks" else DURATIONS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the longest files first, so that two workers end together. A new file counts as long."""
    known = json.loads(durations_file(config).read_text())
    files = {item.nodeid.partition("::")[0] for item in items}
    try:
        number, of = chosen_part(config.getoption("--part"))
    except ValueError as error:
        raise pytest.UsageError(f"--part: {error}") from None
    chosen = parts_of({file: known.get(file, NEW) for file in files}, of)[number - 1]
    left_out = [item for item in items if item.nodeid.partition("::")[0] not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    items.sort(key=lambda item: -known.get(item.nodeid.partition("::")[0], 1e6))


def pytest_collection_finish() -> None:
    """Make collections in tests quick: they don't look at what was imported for them. Commands may
    be forked in the environment that those imports have left.
    """
    if (warm := sys.modules.get("tests.warm_command")) is not None:
        warm.tests_begin()
    gc.collect()
    gc.freeze()


class Recorder:
    """Recorder adds up the seconds of each file's tests."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds[file] = self.seconds.get(file, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        found = json.loads(self.file.read_text()) | self.seconds  # a part may have run
        rounded = {
            file: round(seconds, 1)
            for file, seconds in sorted(found.items())
            if (self.file.parents[1] / file).is_file()
        }
        self.file.write_text(json.dumps(rounded, indent=0) + "\n")


_SILENCED = logging.root.manager.disable
_UMASK = os.umask(0o022)
os.umask(_UMASK)


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """A program that is run in this process may silence warnings, close new files to others or take
    itself for a rank; the next test must not know.

    One thread computes: tensors here are tiny, and threads that wait for each other on cores that
    the ranks of a test need cost ten times the work.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    yield
    for name in LAUNCHED:
        os.environ.pop(name, None)
    os.environ.update(_TOLD)
    logging.disable(_SILENCED)
    os.umask(_UMASK)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A config that can run: its folder and files exist."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    (tmp_path / "train.jsonl").write_text("")
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{path: {model}}}\ndata: {{train: {tmp_path / 'train.jsonl'}}}\n")
    return path
