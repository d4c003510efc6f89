"""docs/your_own_task.md is followed word for word, and ends with a model that has learnt its task."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/your_own_task.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str, str]]:
    """Returns (language, file's name or "", text) of each block of the page."""
    return BLOCK.findall(PAGE.read_text())


def test_every_block_is_a_file_or_commands() -> None:
    assert all(bool(file) != (language == "bash") for language, file, _ in blocks())
    assert [file for _, file, _ in blocks() if file] == [
        f"runs/sort/{name}"
        for name in (
            *("make_data.py", "rewards.py", "template.jinja", "run.yaml", "learnt.py"),
            "ask.py",
        )
    ]


def followed(command: str, folder: Path) -> str:
    """Runs a block of commands as a reader would; returns what it writes."""
    known = ("HOME", "PATH", "LANG", "TMPDIR")  # nothing of this environment's Python
    passed = {name: value for name, value in os.environ.items() if name in known}
    passed |= {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))
    }
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env=passed,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.learning
def test_a_newcomer_follows_readme_and_the_page_to_a_model_that_has_trained(tmp_path: Path) -> None:
    """A fresh clone, an environment that `make demo` makes, and then the page, word for word."""
    clone = tmp_path / "rftmega"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    assert "    make demo " in (clone / "README.md").read_text()
    followed("make demo", clone)
    summary = json.loads((clone / "runs/demo/summary.json").read_text())
    accuracy = summary["evaluation"]["eval_exact_match"]
    assert accuracy["last"] > accuracy["first"] + 0.1
    said = ""
    for language, file, text in blocks():
        if language == "bash":
            said = followed(text, clone)
        else:
            (clone / file).write_text(text)
    lines = (clone / "runs/sort/out/metrics.jsonl").read_text().splitlines()
    found = [step["eval_in_order"] for step in map(json.loads, lines) if "eval_in_order" in step]
    assert found[-1] > found[0] + 0.05
    assert said.startswith("314159=")
    assert (clone / "runs/sort/out/policy/README.md").is_file()
