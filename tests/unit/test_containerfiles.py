"""The Containerfiles install what `make` installs, from files that there are."""

import re
from pathlib import Path

import pytest

from tests.chroot import steps_of

ROOT = Path(__file__).parents[2]
DEVELOPMENT = {"docs", "torchao"}  # what an image to run in has no need of


def installed(text: str) -> set[str]:
    """Returns the names of requirements/ that a text installs."""
    found = re.findall(r"(?:/tmp/)?requirements/([\w$()]+)", text)
    return {name.replace("$(HARDWARE)", "cpu") for name in found}


def commands(path: Path) -> list[tuple[str, str]]:
    return list(steps_of(path.read_text()))


def test_the_image_without_a_gpu_has_what_make_installs() -> None:
    made = (ROOT / "Makefile").read_text()
    recipe = "".join(line for line in made.splitlines(True) if "pip install" in line)
    cpu = {name for name in installed(recipe) if name not in {*DEVELOPMENT, "cuda"}}
    runs = " ".join(given for step, given in commands(ROOT / "Containerfile.cpu") if step == "RUN")
    assert installed(runs) == cpu == {"torch", "cpu", "torchvision_cpu"}


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.cpu"])
def test_all_that_it_copies_and_installs_is_there(name: str) -> None:
    for step, given in commands(ROOT / name):
        if step == "COPY":
            assert (ROOT / given.split()[0]).exists()
        for file in re.findall(r"/tmp/requirements/([\w./]+)", given):
            assert (ROOT / "requirements" / file).exists()


def test_a_step_may_go_on_over_several_lines() -> None:
    text = "# FROM nothing\nFROM a\n\nRUN one && \\\n    two\nENV A=b\n"
    assert list(steps_of(text)) == [("FROM", "a"), ("RUN", "one &&      two"), ("ENV", "A=b")]
