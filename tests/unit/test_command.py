"""The command `rftmega`: what it lists, refuses, completes, and says where something is missing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rftmega
from rftmega import __main__ as command


def asked(*given: str, patch: pytest.MonkeyPatch) -> int:
    patch.setattr(sys, "argv", ["rftmega", *given])
    try:
        return command.main()
    except SystemExit as stop:  # of --help
        return int(stop.code or 0)


def test_help_lists_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(patch=monkeypatch) == 0
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in command.COMMANDS)


@pytest.mark.parametrize(
    "name",
    [
        *("train", "demo", "plan", "plan-sync", "convert", "inspect", "view", "launch", "replay"),
        *("schema", "evaluate"),
        "export-messages",
    ],
)
def test_each_command_has_the_help_of_its_program(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(name, "--help", patch=monkeypatch) == 0
    assert f"usage: rftmega {name}" in capsys.readouterr().out


def test_a_demo_with_a_published_model_has_the_help_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked("demo", "--real", "--help", patch=monkeypatch) == 0
    text = capsys.readouterr().out
    assert "usage: rftmega demo --real" in text
    assert "--seed" in text


def test_the_version_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked("--version", patch=monkeypatch) == 0
    assert capsys.readouterr().out == f"rftmega {rftmega.__version__}\n"


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("rollout", "  rollout.engine = 'vllm'", "rollout.deadline_seconds"),
        ("model.lora", "  model.lora.rank = 0", "model.lora.evaluated"),
        (
            "algorithm.policy_loss",
            "  algorithm.policy_loss.type = clip",
            "algorithm.policy_loss: {type: none}",
        ),
        ("trainer.steps", "  trainer.steps = 100", "trainer.steps"),
        ("critic", "  critic.path = ''", "critic.value_huber"),
    ],
)
def test_help_with_a_name_prints_that_section_only(
    name: str,
    first: str,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked("train", "--help", name, patch=monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == first
    entries = [line for line in lines if not line.startswith(" " * 6)]
    assert all(line.lstrip().startswith(name) for line in entries)
    assert last in entries[-1]


def test_help_begins_with_how_to_print_one_section(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked("train", "--help", patch=monkeypatch) == 0
    begin = "".join(capsys.readouterr().out.splitlines()[:5])
    assert "rftmega train --help [SECTION]" in begin
    assert "rollout" in begin
    assert asked("train", "--help", "rolout", patch=monkeypatch) == 2
    assert "Did you mean rollout?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train", "plan", "serve"])
def test_an_option_with_dashes_is_told_how_to_write_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["--gpus", "8", "--gpu-memory", "80"] if name == "plan" else []
    needed += ["--listen", "10.0.0.1"] if name == "serve" else []
    given = ["--trainer.steps=5", "--rollout.tensor", "2", "--num_generations=8"]
    assert asked(name, "run.yaml", *needed, *given, patch=monkeypatch) == 2
    steps, tensor, generations = capsys.readouterr().err.splitlines()
    assert steps.endswith("Write trainer.steps=5.")
    assert tensor.endswith("Write rollout.tensor=VALUE.")
    assert "users of TRL: rollout.samples_per_prompt" in generations


def test_help_names_programs_as_they_are_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in set(command.COMMANDS) - {"demo", "completion"}:
        asked(name, "--help", patch=monkeypatch)
        said = capsys.readouterr().out
        assert f"rftmega {name}" in said
        assert not re.search(
            r"\b(?!my_rewards|my_tools|my)[a-z_]+\.py [A-Za-z]", said.partition("Options,")[0]
        ), name


def test_a_typo_is_told_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked("trian", patch=monkeypatch) == 2
    assert "Did you mean train?" in capsys.readouterr().err
    assert asked("fly", patch=monkeypatch) == 2
    assert "Commands: train, demo, init, check, plan" in capsys.readouterr().err


def test_a_missing_package_is_told_with_the_lines_that_bring_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "rftmega.tools.plan", raising=False)

    def absent(given: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm.config")

    monkeypatch.setattr("rftmega.tools.inspect_checkpoint.main", absent)
    assert asked("inspect", str(tmp_path), patch=monkeypatch) == 2
    said = capsys.readouterr().err
    assert "`rftmega inspect` needs vllm.config, which is not installed here" in said
    for line in said.splitlines():
        if "pip install" in line:
            files = [Path(word) for word in line.split() if "requirements" in word]
            assert files
            assert all(file.exists() for file in files)


def test_bash_completes_commands_options_and_files(tmp_path: Path) -> None:
    script = subprocess.run(
        [sys.executable, "-m", "rftmega", "completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (tmp_path / "run.yaml").touch()

    def completed(*words: str) -> list[str]:
        typed = " ".join(f"'{word}'" for word in words)
        program = f"{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _rftmega; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        done = subprocess.run(
            ["bash", "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
        )
        return done.stdout.split()

    assert completed("rftmega", "pl") == ["plan", "plan-sync"]
    assert completed("rftmega", "train", "ru") == ["run.yaml"]
    assert completed("rftmega", "train", "parallel.ten") == ["parallel.tensor="]
    assert completed("rftmega", "view", "run") == ["run.yaml"]


def test_another_shell_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked("completion", "tcsh", patch=monkeypatch) == 2
    assert "bash or zsh" in capsys.readouterr().err
