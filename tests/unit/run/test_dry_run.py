"""A dry run looks at the data and the reward as a run would, and starts nothing."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rftmega.examples.arithmetic import warm_start
from rftmega.run.command_line import run
from tests.tiny_models import save_tiny

REWARDS = """
def near(prompts, completions, label):
    return [1.0 for _ in completions]

def odd(completions, colour):
    return [1.0 for _ in completions]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's model, data and functions, all of them sound."""
    save_tiny(tmp_path / "model", "qwen3", vocab_size=16)
    warm_start.tokenizer().save_pretrained(tmp_path / "model")
    write(tmp_path / "train.jsonl", [{"prompt": "1+1=", "label": "2"}] * 20)
    write(tmp_path / "eval.jsonl", [{"prompt": "1+2=", "label": "3"}])
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path}/model}}\n"
        f"data: {{train: {tmp_path}/train.jsonl, eval: {tmp_path}/eval.jsonl}}\n"
        f"reward: {{functions: ['{tmp_path}/rewards.py:near']}}\n"
        "rollout: {engine: transformers, max_prompt_tokens: 8, max_response_tokens: 4}\n"
        f"trainer: {{output: {tmp_path}/out}}\n"
    )
    return tmp_path


def write(path: Path, records: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def dry(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *given: str
) -> tuple[int, str]:
    """Returns the exit code of a dry run, and all that it said."""
    command = ["rftmega", str(folder / "run.yaml"), *given, "--dry-run", "--processes", "1"]
    monkeypatch.setattr("sys.argv", command)
    code = run("")
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_dry_run_says_what_it_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = dry(folder, monkeypatch, capsys)
    assert code == 0, said
    files = f"{folder}/train.jsonl, {folder}/eval.jsonl"
    assert f"looked at   the first 8 records of {files}; reward of near" in said
    assert not (folder / "out").exists()
    with (folder / "train.jsonl").open("a") as file:
        file.write("no JSON\n")
    assert dry(folder, monkeypatch, capsys)[0] == 0, "the 21st record is not read"


def test_a_dry_run_counts_parameters_under_each_backend(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers' own count; FSDP shares them among processes."""
    config = AutoConfig.from_pretrained(folder / "model")
    with torch.device("meta"):
        number = AutoModelForCausalLM.from_config(config).num_parameters()
    for backend in ("megatron", "fsdp"):
        code, said = dry(folder, monkeypatch, capsys, f"backend={backend}")
        assert code == 0, said
        assert f"{number:,} parameters" in said
    assert f"parameters a rank: about {number:,}" in said


@pytest.mark.parametrize(
    ("records", "option", "why"),
    [
        ([{"question": "1"}], "", 'no "prompt"|prompt'),
        ([{"prompt": "1+1="}], "", "label"),
        ([{"prompt": "x", "label": "2"}, {"prompt": "1" * 20, "label": "2"}], "", "20"),
        ([], "reward.functions=[{folder}/rewards.py:odd]", "odd asks for colour"),
        ([], "reward.functions=[{folder}/rewards.py:none]", "none"),
        ([], "reward.functions=[{folder}/absent.py:near]", "absent.py"),
        ([], "reward.answer_pattern='('", "answer_pattern"),
        ([{"prompt": "1+1=", "label": ""}], "reward.math=1", "reward.math: the label ''"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would_refuse_of_data_and_reward(
    records: list[dict[str, str]],
    option: str,
    why: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if records:
        write(folder / "train.jsonl", records)
    given = [option.format(folder=folder)] if option else []
    code, said = dry(folder, monkeypatch, capsys, *given)
    assert code != 0, said
    assert any(part in said for part in why.split("|")), said
    assert "Traceback" not in said
