"""For every test."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("rftmega", deadline=None)  # a timing never decides a test
settings.load_profile("rftmega")

# what a launcher tells its ranks
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_TOLD = {name: os.environ[name] for name in LAUNCHED if name in os.environ}


def pytest_configure(config: pytest.Config) -> None:
    """Only tests marked gpu see a GPU: all others are written for a CPU, with more ranks than a
    host has devices.
    """
    if Path("/proc/driver/nvidia").exists() and config.getoption("markexpr").strip() != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


_SILENCED = logging.root.manager.disable
_UMASK = os.umask(0o022)
os.umask(_UMASK)


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """A program that is run in this process may silence warnings, close new files to others or take
    itself for a rank; the next test must not know.
    """
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
