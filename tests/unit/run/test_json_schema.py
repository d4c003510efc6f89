"""The JSON schema of config files: it takes what `load` takes, and underlines what `load` refuses.

The `jsonschema` package judges.
"""

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from rftmega import __main__ as program
from rftmega.config import load, plugins_of
from rftmega.config.files import read_yaml
from rftmega.config.tree import options
from rftmega.core.errors import ConfigError
from rftmega.run.json_schema import json_schema
from rftmega.tools import schema as tool

ROOT = Path(__file__).parents[3]
FILES = sorted(
    path for folder in ("examples", "rftmega/config") for path in (ROOT / folder).rglob("*.yaml")
)
MODELINE = re.compile(r"# yaml-language-server: \$schema=(\S+)\n")


@cache
def built_in() -> dict[str, Any]:
    return json_schema()


def complaints(text: str, schema: dict[str, Any] | None = None) -> list[str]:
    found = Draft7Validator(schema or built_in()).iter_errors(read_yaml(text))
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in found]


def yaml_blocks(document: str) -> Iterator[str]:
    """Yields the fenced blocks of YAML of a document."""
    yield from re.findall(r"^```yaml\n(.*?)^```", document, re.MULTILINE | re.DOTALL)


def test_it_is_a_schema_that_jsonschema_reads() -> None:
    Draft7Validator.check_schema(built_in())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_and_recipe_fits_and_says_where_its_schema_is(path: Path) -> None:
    own = plugins_of(path)
    assert complaints(path.read_text(), json_schema(own) if own else built_in()) == []
    named = MODELINE.match(path.read_text())
    if "\nplugins:" in path.read_text():  # the schema beside the examples does not know theirs
        assert named is None
        return
    assert named, f"{path} does not begin with a line of yaml-language-server"
    assert (path.parent / named[1]).resolve() == ROOT / "rftmega.schema.json"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_every_block_of_yaml_in_the_documents_fits(path: Path) -> None:
    found = map(complaints, yaml_blocks(path.read_text()))
    assert [each for each in found if each] == []


def test_the_file_beside_the_examples_is_what_the_program_writes() -> None:
    command = "python -m rftmega schema > rftmega.schema.json"
    assert json.loads((ROOT / "rftmega.schema.json").read_text()) == built_in(), command


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("rollout: {temprature: 0.7}", "temprature"),
        ("paralel: {tensor: 2}", "paralel"),
        ("parallel: {tensor: 0}", "parallel.tensor"),
        ("parallel: {tensor: two}", "parallel.tensor"),
        ("backend: megatorn", "backend"),
        ("algorithm: {advantage: gea}", "algorithm.advantage"),
        ("algorithm: {advantage: {type: gae, scale_by_std: true}}", "algorithm.advantage"),
        ("algorithm: {policy_loss: {hihg: 0.3}}", "algorithm.policy_loss"),
        ("algorithm: {policy_loss: {type: clip, low: 1.5}}", "algorithm.policy_loss"),
        ("critic: {parallel: {tensr: 1}}", "tensr"),
        ("optimizer: {beta1: 1.0}", "optimizer.beta1"),
        ("reward: {functions: mine.py:f}", "reward.functions"),
        ("trainer: {steps: true}", "trainer.steps"),
    ],
)
def test_a_typo_is_refused_by_the_schema_and_by_the_program(
    text: str, where: str, tmp_path: Path
) -> None:
    assert any(where in complaint for complaint in complaints(text)), complaints(text)
    (tmp_path / "a.yaml").write_text(f"model: {{path: x}}\n{text}\n")
    try:
        config = load(tmp_path / "a.yaml")
    except ConfigError:
        return
    from rftmega.config.validation.ranges import choices_and_ranges

    assert any(choices_and_ranges(config)), "the schema is stricter than the program"


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: {advantage: gae, policy_loss: {low: 0.0003}}",  # a recipe may name its type
        "algorithm: {importance_sampling: {type: mask, cap: 3}}",
        "model:\nparallel: {tensor: 2}\nbase: other.yaml",
        "data: {sources: {a.jsonl: 3, b.jsonl: 0.5}, chat_template_kwargs: {enable_thinking: false}}",
        "reward: {recipe: {sum: {math: 1}}, custom: {}}",
        "environment: single_turn",
    ],
)
def test_what_the_program_reads_fits(text: str) -> None:
    assert complaints(text) == []


def leaves(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the dotted names of all options with their schemas; a union's are those of any part."""
    for name, inner in schema.get("properties", {}).items():
        (whole,) = [each for each in inner.get("anyOf", [inner]) if "allOf" in each] or [inner]
        if "properties" in whole:
            yield from leaves(whole, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def test_it_has_every_option_and_no_other() -> None:
    known = {name for name, _ in leaves(built_in())}
    assert known == {*options(), "base"}


def test_every_option_says_what_it_means() -> None:
    silent = [
        name
        for name, schema in leaves(built_in())
        if not (schema.get("description") or "anyOf" in schema) and not name.endswith(".type")
    ]
    assert silent == []


def test_parts_of_a_users_own_are_in_the_schema_of_their_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom typing import Literal\n"
        "from rftmega.config.options.parts import Advantage, implements\n\n\n"
        "@dataclass(frozen=True)\nclass Scaled(Advantage):\n    '''Scales.'''\n\n"
        "    type: Literal['scaled'] = 'scaled'\n    factor: float = 2.0\n    '''By so much.'''\n\n\n"
        "@implements(Scaled)\ndef scaled(batch, options):\n    return options.factor * batch.reward\n"
    )
    options = "algorithm: {advantage: {type: scaled, factor: 3}}"
    text = f"plugins: [{tmp_path / 'mine.py'}]\n{options}\n"
    (tmp_path / "run.yaml").write_text(text)
    assert tool.main([str(tmp_path / "run.yaml")]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written == json_schema(plugins_of(tmp_path / "run.yaml"))
    assert complaints(text, written) == []
    assert complaints(text)
    assert complaints(text.replace("factor", "fcator"), written)


def test_the_command_prints_the_schema_and_a_missing_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rftmega", "schema"])
    assert program.main() == 0
    assert json.loads(capsys.readouterr().out) == built_in()
    assert tool.main([str(tmp_path / "none.yaml")]) == 2
