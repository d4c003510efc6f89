import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rftmega.config import load
from rftmega.config.validation.optimizer import optimizer

CHECKS = sys.modules[optimizer.__module__]  # whose name in its package is the function's
MUON = "optimizer.name=muon"


def reasons(folder: Path, *options: str) -> list[str]:
    (folder / "run.yaml").write_text(f"model: {{path: {folder}}}")
    return optimizer(load(folder / "run.yaml", list(options)))


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHECKS, "find_spec", lambda name: name)


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["optimizer.states=8bit", "backend=fsdp"], "states=8bit needs backend=megatron"),
        ([MUON, "backend=fsdp"], "optimizer.name=muon needs backend=megatron"),
        (["optimizer.states=bfloat16", "optimizer.beta2=0.999"], "would never shrink"),
        ([MUON, "optimizer.states=8bit"], "has one moment, in float32"),
        ([MUON, "model.lora.rank=8"], "leaves no whole matrix to learn"),
        ([MUON, "parallel.expert=2"], "mixes up the groups of experts"),
        (
            [
                *("algorithm.advantage=gae", "critic.optimizer.states=bfloat16"),
                "critic.optimizer.beta2=0.999",
            ],
            "critic.optimizer.states=bfloat16 with critic.optimizer.beta2=0.999",
        ),
        (
            ["algorithm.advantage=gae", "critic.optimizer.name=muon"],
            "a value head has one row",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_an_optimizer_can_not_do_is_refused(
    options: list[str], said: str, tmp_path: Path
) -> None:
    found = reasons(tmp_path, *options)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(
    "options",
    [
        ["optimizer.states=8bit", "optimizer.beta2=0.999"],
        ["optimizer.states=bfloat16", "optimizer.beta2=0.998"],
        ["optimizer.states=bfloat16", "optimizer.distributed=true", "model.lora.rank=8"],
        [MUON, "parallel.tensor=2"],
        ["critic.optimizer.name=muon"],  # of no critic: others say that
    ],
    ids=" ".join,
)
def test_what_it_can_do_is_not(options: list[str], tmp_path: Path) -> None:
    assert reasons(tmp_path, *options) == []


@pytest.mark.parametrize(
    ("option", "package"),
    [("optimizer.states=8bit", "torchao"), (MUON, "emerging_optimizers")],
)
def test_a_package_that_is_not_installed_is_named(
    option: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        CHECKS, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    (found,) = reasons(tmp_path, option)
    assert f"{option} needs the package {package}, which is not installed" in found
