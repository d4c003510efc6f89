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
    monkeypatch.setattr(in_two, "TOGETHER", {"b": [paths["one"], paths["two"]]})
    monkeypatch.setattr(in_two, "ALONE", (paths["three"],))
    monkeypatch.setattr(in_two, "CHECK", ("true",))
    assert in_two.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 passed, 1 failed"
    assert any(line.startswith("b: FAILED") for line in lines)


def test_what_fails_beside_others_and_passes_alone_is_named_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "test_busy.py"
    path.write_text(
        "from pathlib import Path\n"
        "def test_a():\n"
        "    seen = Path(__file__).with_suffix('.seen')\n"
        "    there = seen.exists()\n"
        "    seen.touch()\n"
        "    assert there\n"
    )
    (tmp_path / "test_calm.py").write_text("def test_b(): pass")
    monkeypatch.setattr(in_two, "TOGETHER", {"a": [str(path)]})
    monkeypatch.setattr(in_two, "ALONE", (str(tmp_path / "test_calm.py"),))
    monkeypatch.setattr(in_two, "CHECK", ("true",))
    assert in_two.main() == 0
    *_, named, last = capsys.readouterr().out.splitlines()
    assert last == "2 passed, 0 failed"
    assert named.startswith("failed beside others and passed alone")
    assert named.endswith("test_busy.py::test_a")


def test_after_a_check_that_failed_no_more_tests_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_calm.py").write_text("def test_b(): pass")
    monkeypatch.setattr(in_two, "TOGETHER", {"a": [str(tmp_path / "none.py")]})
    monkeypatch.setattr(in_two, "ALONE", (str(tmp_path / "test_calm.py"),))
    monkeypatch.setattr(in_two, "CHECK", ("sh", "-c", "echo E501; exit 3"))
    assert in_two.main() == 3
    lines = capsys.readouterr().out.splitlines()
    assert "check: E501" in lines
    assert lines[-1].endswith("failed, so that no more tests are run")
