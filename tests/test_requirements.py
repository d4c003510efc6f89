"""Both environments are pinned to the last package, and what this project imports is of one version
in both.
"""

import importlib.util
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

FOLDER = Path(__file__).parents[1] / "requirements"
FROZEN = ("cpu", "cuda", "docs", "torchao", "transformer_engine", "trl")
IMPORTED = (
    *(
        "megatron-core",
        "transformers",
        "safetensors",
        "omegaconf",
        "tensorboard",
        "prometheus_client",
        "pyarrow",
        "datasets",
        "pydantic",
        "cloudpickle",
        "pillow",
        "soundfile",
        "torchvision",
    ),
    *(
        "matplotlib",
        "tqdm",
        "httpx",
        "math-verify",
        "pytest",
        "hypothesis",
        "ruff",
        "mypy",
        "playwright",
    ),
)


def pins(name: str) -> dict[str, str]:
    """Package -> version."""
    lines = [
        line
        for line in (FOLDER / f"{name}.txt").read_text().splitlines()
        if line and not line.startswith(("#", "--"))
    ]
    found = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[^]]*])?===?([^\s;=]+)(?:;.*)?", line.strip())
        assert match, f"{name}.txt: {line!r} is no pin"
        package = re.sub(r"[-_.]+", "-", match[1]).lower()
        assert package not in found, f"{name}.txt: {package} is there twice"
        found[package] = match[2]
    return found


@pytest.mark.parametrize("name", FROZEN)
def test_every_package_has_one_version(name: str) -> None:
    assert pins(name)


def test_what_is_imported_is_of_one_version_on_a_cpu_and_on_gpus() -> None:
    cpu, cuda = pins("cpu"), pins("cuda")
    names = [re.sub(r"[-_.]+", "-", name).lower() for name in IMPORTED]
    assert {name: cuda.get(name) for name in names} == {name: cpu.get(name) for name in names}
    assert None not in (cuda.get(name) for name in names)
    torch = re.search(r"torch==([\d.]+)\+cpu", (FOLDER / "torch.txt").read_text())
    assert torch and cuda["torch"] == torch[1], "no build for CPUs, and the same version"


@pytest.mark.parametrize("name", ["torchao", "transformer_engine"])
def test_what_is_optional_adds_and_changes_nothing(name: str) -> None:
    assert not pins(name).keys() & pins("cuda").keys()


def test_the_site_needs_nothing_that_is_not_pinned_and_pins_nothing_twice() -> None:
    docs, cpu = pins("docs"), pins("cpu")
    assert not docs.keys() & (cpu.keys() | pins("cuda").keys())
    needed = [Requirement(each) for name in docs for each in requires(name) or ()]
    names = {each.name for each in needed if each.marker is None or each.marker.evaluate()}
    known = docs.keys() | cpu.keys() | {"setuptools"}
    assert {re.sub(r"[-_.]+", "-", name).lower() for name in names} <= known


def said(code: str) -> str:
    """What a Python of its own prints."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.ranks
def test_torchvision_is_imported_in_any_process_and_its_transforms_work() -> None:
    code = (
        "from torchvision.transforms import v2; import torch; "
        "print(v2.functional.resize(torch.ones(3, 4, 4), [2, 6]).shape)"
    )
    assert said(code) == "torch.Size([3, 2, 6])"


def test_a_process_that_wants_no_torchvision_does_not_import_torch_for_it() -> None:
    assert said("import sys; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize(("version", "defines"), [("0.28.0+cu130", True), ("0.28.0+cpu", False)])
def test_only_a_build_for_cuda_is_given_operators(
    version: str, defines: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    file = FOLDER / "torchvision_cpu/torchvision_operators.py"
    spec = importlib.util.spec_from_file_location("operators", file)
    assert spec is not None and spec.loader is not None
    operators = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(operators)
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").touch()
    (tmp_path / "torchvision/version.py").write_text(f"__version__ = '{version}'\n")
    called: list[bool] = []
    monkeypatch.setattr(operators, "define", lambda: called.append(True))
    found = sys.meta_path[0].find_spec("torchvision", [str(tmp_path)])
    assert found is not None and found.origin == str(tmp_path / "torchvision/__init__.py")
    assert bool(called) == defines
