"""What an export may replace: an earlier one of its own, and nothing else."""

import logging
from pathlib import Path

import pytest

from rftmega.models.hf.export_folder import MARK, begin, is_anothers, settle


def exported(folder: Path, content: str) -> Path:
    draft = begin(folder)
    (draft / "model").write_text(content)
    return settle(draft, folder)


def test_an_export_replaces_an_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    for content in ("first", "second"):
        assert exported(folder, content) == folder
        assert (folder / "model").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.parametrize("kind", ["a folder", "a file", "a link", "a link to nowhere"])
def test_what_no_export_made_stays_and_the_model_goes_beside_it(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "policy"
    others = tmp_path / "others"
    others.mkdir()
    (others / "thesis").write_text("years")
    if kind == "a folder":
        others.rename(folder)
    elif kind == "a file":
        folder.write_text("years")
    else:
        folder.symlink_to(others if kind == "a link" else tmp_path / "nowhere")
    assert is_anothers(folder)
    with caplog.at_level(logging.WARNING):
        assert exported(folder, "model") == tmp_path / "policy.2"
    assert is_anothers(folder) and (tmp_path / "policy.2" / MARK).is_file()
    assert (
        f"{folder} is no export's, and stays; the model is in {tmp_path / 'policy.2'}"
        in caplog.text
    )


def test_an_empty_folder_is_nobodys_and_a_draft_that_died_goes(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (begin(tmp_path / "policy") / "half").write_text("a model")
    assert exported(tmp_path / "policy", "model") == tmp_path / "policy"
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == [MARK, "model"]


def test_a_folder_with_a_drafts_name_that_no_export_made_stays(tmp_path: Path) -> None:
    (tmp_path / "policy.incomplete").mkdir()
    (tmp_path / "policy.incomplete" / "thesis").write_text("years")
    with pytest.raises(FileExistsError, match="no export made it"):
        begin(tmp_path / "policy")
    assert (tmp_path / "policy.incomplete" / "thesis").is_file()


def test_the_earlier_export_is_there_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the process between: one of the two is on the disk, and the next export goes
    well.
    """
    folder, real = tmp_path / "policy", Path.rename
    exported(folder, "first")

    def dies(path: Path, target: Path) -> Path:
        if path.name.endswith(".incomplete"):
            raise OSError("died")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(OSError, match="died"):
        exported(folder, "second")
    monkeypatch.undo()
    assert (tmp_path / "policy.before" / "model").read_text() == "first"
    assert exported(folder, "third") == folder
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
