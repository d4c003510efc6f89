"""The examples of docs/data.md are read as it says."""

from pathlib import Path
from typing import Any

import pytest

from rftmega.config import DataConfig, load, shares
from rftmega.data.preference import load_preferences
from rftmega.data.prompts import load_prompts
from rftmega.data.supervised import load_supervised
from tests.unit.data.test_supervised import Letters

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs/data.md").read_text()


def lines(section: str) -> list[str]:
    (text,) = (part for part in DOCUMENT.split("\n## ") if part.startswith(section))
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


@pytest.mark.parametrize(
    ("section", "loader", "limits"),
    [
        ("Prompts", load_prompts, {"max_prompt_tokens": 50}),
        (
            "Responses to train on",
            load_supervised,
            {"max_prompt_tokens": 50, "max_response_tokens": 50},
        ),
        ("Preferences", load_preferences, {"max_prompt_tokens": 50, "max_response_tokens": 50}),
    ],
)
def test_the_records_of_the_documentation_are_read(
    section: str, loader: Any, limits: dict[str, int], tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(line for line in lines(section) if line.startswith("{")))
    assert len(loader(path, Letters(), DataConfig(), **limits)) == 3


def test_the_sources_of_the_documentation_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        f"model: {{path: x}}\n{lines('Several')[0]}\n"
        + "\n".join(f"  {x}" for x in lines("Several")[1:])
    )
    config = load(tmp_path / "a.yaml").data
    assert config.eval == "held_out.jsonl"
    assert shares(list(config.sources.values())) == [6, 2, 1]
