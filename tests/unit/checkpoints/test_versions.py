import subprocess
from pathlib import Path

import pytest

from rftmega.checkpoints.code_versions import commit


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=me", "-c", "user.email=me@host"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_commit_is_known_by_its_hash_and_what_was_changed_since_is_said(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "tag", "-a", "v1", "-m", "a name that is no hash")
    whole = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "new.txt").write_text("not the repository's")
    assert commit(tmp_path) == whole
    (tmp_path / "code.py").write_text("2")
    assert commit(tmp_path) == f"{whole}-dirty"


def test_of_a_folder_in_somebody_elses_repository_nothing_is_known(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "installed").mkdir()
    (tmp_path / "a").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    assert commit(tmp_path / "installed") == ""


def test_without_git_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(tmp_path) == ""
