"""Every file that a run reads is described in its checkpoints, and a change of one is told."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftmega.checkpoints.inputs import changed_inputs
from rftmega.config import RunConfig, load
from rftmega.data.sampler import PromptOrder, order_of
from rftmega.run.input_files import inputs_of

CONFIG = """
model: {path: model}
data: {sources: {a.jsonl: 1, folder: 2}, evals: {easy: e.jsonl}, ptx: p.jsonl, chat_template_file: t.jinja}
reward: {functions: [mine.py:f, mine.py:g, on_the_path:h], judge_template: ask.txt, model: 1, model_path: judge}
environment: {type: tools, tools: [tools.py:search]}
critic: {path: values}
rollout: {order: order.jsonl}
"""
READ = {  # file -> the name of what it is
    "a.jsonl": "data.sources.a.jsonl",
    "folder/train/0.jsonl": "data.sources.folder",
    "e.jsonl": "data.evals.easy",
    "p.jsonl": "data.ptx",
    "t.jinja": "data.chat_template_file",
    "mine.py": "reward.functions mine.py",
    "on_the_path.py": "reward.functions on_the_path.py",
    "ask.txt": "reward.judge_template",
    "tools.py": "environment.tools tools.py",
    "part.py": "plugins part.py",
    "order.jsonl": "rollout.order",
    "model/tokenizer.json": "model.path tokenizer.json",
    "model/generation_config.json": "model.path generation_config.json",
    "judge/tokenizer.json": "reward.model_path tokenizer.json",
    "values/config.json": "critic.path config.json",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for file in (*READ, "model/model.safetensors"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    return tmp_path


def described(folder: Path, rows: Callable[[str], int] = lambda source: 3) -> Any:
    """As a checkpoint gives it back."""
    (folder / "run.yaml").write_text(CONFIG)
    config: RunConfig = load("run.yaml")
    config.plugins = ["part.py"]
    order = order_of(config.data, lambda source: [0] * rows(source), batch_size=1, seed=0)
    ptx = PromptOrder([0] * rows("ptx"), batch_size=1, seed=0)
    held_out = {"easy": [0] * rows("easy")}
    return json.loads(json.dumps(inputs_of(config, order, held_out, ptx)))


QUICK = ("a.jsonl", "folder/train/0.jsonl", "mine.py", "part.py", "model/tokenizer.json")


@pytest.mark.parametrize(
    "file",
    [file if file in QUICK else pytest.param(file, marks=pytest.mark.ranks) for file in READ],
)
def test_a_file_that_changed_is_told_like_an_option(file: str, folder: Path) -> None:
    before = described(folder)
    assert changed_inputs(before, described(folder)) == []
    (folder / file).write_text("# another")
    (told,) = changed_inputs(before, described(folder))
    assert told.startswith(f"{READ[file]}: ")
    if "/" not in file:
        now = hashlib.sha256(b"# another").hexdigest()
        was = hashlib.sha256(b"").hexdigest()
        assert f"sha256 {was[:12]} -> " in told and told.endswith(now[:12])


def test_data_tell_their_rows(folder: Path) -> None:
    before = described(folder)
    fewer = described(folder, lambda source: 2 if source == "a.jsonl" else 3)
    (told,) = changed_inputs(before, fewer)
    assert told.startswith("data.sources.a.jsonl: 3 rows, ") and " -> 2 rows, " in told
    assert before["data.evals.easy"]["rows"] == before["data.ptx"]["rows"] == 3


def test_weights_are_no_files_that_are_read_once_more(folder: Path) -> None:
    before = described(folder)
    (folder / "model/model.safetensors").write_text("others")
    assert changed_inputs(before, described(folder)) == []


def test_a_pipe_is_not_read(folder: Path) -> None:
    (folder / "a.jsonl").unlink()
    os.mkfifo(folder / "a.jsonl")
    assert described(folder)["data.sources.a.jsonl"] == {"rows": 3}


def test_what_one_side_does_not_know_is_not_told() -> None:
    assert changed_inputs({"a": {"rows": 1}}, {"b": {"rows": 2}}) == []
    told = changed_inputs({"m": {"weights": 123}}, {"m": {"weights": -5}})
    assert told == ["m: weights 123 -> weights -5"]
