"""Both environments are pinned to the last package, and what this project imports is of one version
in both.
"""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "requirements"
FROZEN = ("cpu", "cuda", "transformer_engine", "trl")
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


def test_transformer_engine_adds_and_changes_nothing() -> None:
    assert not pins("transformer_engine").keys() & pins("cuda").keys()
