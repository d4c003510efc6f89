"""What a launcher sets, and what somebody else set."""

import sys
from pathlib import Path

import pytest

from rftmega.core.errors import ConfigError
from rftmega.run.command_line import run
from rftmega.runtime.parallel.environment import whole_number


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert whole_number("WORLD_SIZE") == 4
    for given in ("abc", "", "-1", "1.5", "4x"):
        monkeypatch.setenv("WORLD_SIZE", given)
        with pytest.raises(ConfigError, match=f"WORLD_SIZE='{given}' must be a whole number"):
            whole_number("WORLD_SIZE")
    monkeypatch.delenv("WORLD_SIZE")
    assert whole_number("WORLD_SIZE", 1) == 1
    with pytest.raises(ConfigError, match="WORLD_SIZE is not set"):
        whole_number("WORLD_SIZE")


def test_the_program_says_so_and_shows_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: x}")
    monkeypatch.setattr(sys, "argv", ["train_rl.py", str(tmp_path / "run.yaml")])
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert run("") == 2
    said = capsys.readouterr().err
    assert "error: WORLD_SIZE='abc' must be a whole number" in said
    assert "Traceback" not in said
