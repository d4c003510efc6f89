"""Two processes of pytest are as one: what failed in either is told, and counted."""

from pathlib import Path

import pytest

from tests import in_two


def test_what_fails_in_any_of_them_fails_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "one": "def test_a(): pass",
        "two": "def test_b(): assert 0",
        "three": "def test_c(): pass",
    }
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    paths = {name: str(tmp_path / f"test_{name}.py") for name in files}
    monkeypatch.setattr(in_two, "TOGETHER", {"a": [paths["one"]], "b": [paths["two"]]})
    monkeypatch.setattr(in_two, "ALONE", paths["three"])
    assert in_two.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 passed, 1 failed"
    assert any(line.startswith("b: FAILED") for line in lines)
    monkeypatch.setattr(in_two, "TOGETHER", {"a": [paths["one"]]})
    assert in_two.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 0 failed"
