import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftmega.checkpoints.retention import (
    LATEST,
    MARK,
    Saved,
    before,
    begin,
    expired,
    find,
    newest,
    point_to,
    rotate,
    settle,
)
from rftmega.core.errors import CheckpointError

MB = 10**6


def saved(*sizes: int) -> list[Saved]:
    """Oldest first."""
    return [Saved(str(number), len(sizes) - number, size) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "max_num", "max_mem", "gone"),
    [
        ((MB, MB, MB), 3, 100, []),
        ((MB, MB, MB, MB), 3, 100, ["0"]),
        ((MB, 5 * MB, MB), 3, 6, ["0"]),
        ((MB, 5 * MB, MB), 3, 5, ["0", "1"]),
        ((MB, 9 * MB), 3, 1, ["0"]),  # the newest stays although it alone is too large
        ((MB, MB), 0, 100, ["0"]),
        ((), 3, 100, []),
    ],
)
def test_the_oldest_go_until_number_and_size_fit(
    sizes: tuple[int, ...], max_num: int, max_mem: float, gone: list[str]
) -> None:
    assert expired(saved(*sizes), max_num=max_num, max_mem=max_mem) == gone
    assert expired(saved(*sizes)[::-1], max_num=max_num, max_mem=max_mem) == gone


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 5 * MB), min_size=1, max_size=8), st.integers(1, 9), st.integers(0, 20)
)
def test_what_stays_is_the_longest_run_of_the_newest_that_fits(
    sizes: list[int], max_num: int, max_mem: int
) -> None:
    kept = len(sizes) - len(expired(saved(*sizes), max_num=max_num, max_mem=max_mem))
    fits = [n for n in range(1, len(sizes) + 1) if n <= max_num and sum(sizes[-n:]) <= max_mem * MB]
    assert kept == max(fits, default=1)


def checkpoint(folder: Path, name: str, when: int) -> None:
    (folder / name).mkdir()
    (folder / name / "weights").write_bytes(b"x" * 1000)
    for part in ("manifest.json", "rank_0.json", MARK):
        (folder / name / part).touch()
    os.utime(folder / name, (when, when))


def test_nothing_but_checkpoints_and_drafts_of_dead_saves_is_ever_deleted(tmp_path: Path) -> None:
    for name in ("tensorboard", "policy", "converted"):
        (tmp_path / name).mkdir()
    # a model's, which tools/convert.py made
    (tmp_path / "converted" / "manifest.json").write_text("{}")
    (tmp_path / "download.incomplete").mkdir()
    (tmp_path / "download.incomplete" / "part").write_text("somebody's")
    for when, name in enumerate(["dead.incomplete", "old", "new", "alive.incomplete"]):
        checkpoint(tmp_path, name, when)
    for path in tmp_path.iterdir():
        if (
            path.name == "download.incomplete"
            or "." not in path.name
            and path.name not in ("old", "new")
        ):
            os.utime(path, (0, 0))
    point_to(tmp_path, "new")
    assert rotate(tmp_path, max_num=1, max_mem=1) == ["old", "dead.incomplete"]
    left = {
        "alive.incomplete",
        "converted",
        "download.incomplete",
        "latest",
        "new",
        "policy",
        "tensorboard",
    }
    assert {path.name for path in tmp_path.iterdir()} == left


def test_complete_folders_are_rotated_and_drafts_and_the_pointer_left_alone(tmp_path: Path) -> None:
    for when, name in enumerate(["c", "b", "a", "d.incomplete"]):
        checkpoint(tmp_path, name, when)
    point_to(tmp_path, "a")
    assert rotate(tmp_path, max_num=3, max_mem=0.0025) == ["c"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "d.incomplete", "latest"]


def test_what_the_pointer_names_stays_although_it_is_old(tmp_path: Path) -> None:
    for when, name in enumerate(["old", "older_than_new", "new"]):
        checkpoint(tmp_path, name, when)
    point_to(tmp_path, "old")
    assert rotate(tmp_path, max_num=1, max_mem=1) == ["older_than_new"]
    assert find(tmp_path, None).name == "old"


def test_what_cannot_be_deleted_is_told_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for when, name in enumerate(["first", "second", "new"]):
        checkpoint(tmp_path, name, when)
    delete = shutil.rmtree

    def rmtree(path: Path) -> None:
        if path.name == "first":
            raise PermissionError("not yours")
        delete(path)

    monkeypatch.setattr("rftmega.checkpoints.retention.shutil.rmtree", rmtree)
    assert rotate(tmp_path, max_num=1, max_mem=1) == ["second"]
    assert "first can't be deleted, and stays: not yours" in caplog.text


def test_the_latest_is_found_and_a_missing_one_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no file named latest"):
        find(tmp_path, None)
    checkpoint(tmp_path, "one", 0)
    point_to(tmp_path, "one")
    assert find(tmp_path, None) == find(tmp_path, "one") == tmp_path / "one"
    with pytest.raises(CheckpointError, match="no checkpoint 'two'"):
        find(tmp_path, "two")


@pytest.mark.parametrize("said", ["", "\n", "\0\0\0", "gone", "draft.incomplete", "half"])
def test_a_pointer_to_nothing_whole_gives_the_newest_whole_one_with_a_word(
    said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for when, name in enumerate(["one", "two", "half", "draft.incomplete"]):
        checkpoint(tmp_path, name, when)
        os.utime(tmp_path / name / "manifest.json", (when, when))
    (tmp_path / "half" / "manifest.json").unlink()
    (tmp_path / LATEST).write_text(said)
    assert newest(tmp_path) == find(tmp_path, None) == tmp_path / "two"
    assert f"The run goes on from the newest whole one, {tmp_path / 'two'}." in caplog.text
    with pytest.raises(
        CheckpointError, match=f"no checkpoint 'gone'. The newest whole one is {tmp_path / 'two'}"
    ):
        find(tmp_path, "gone")
    rotate(tmp_path, max_num=1, max_mem=1)
    assert (tmp_path / "two").is_dir()


def test_a_pointer_to_nothing_where_there_is_nothing_whole_says_so(tmp_path: Path) -> None:
    (tmp_path / LATEST).write_text("step_000002")
    with pytest.raises(
        CheckpointError,
        match=r"names 'step_000002', which is no whole checkpoint. There is no whole one",
    ):
        find(tmp_path, None)


def test_a_draft_that_no_save_made_stays(tmp_path: Path) -> None:
    (begin(tmp_path, "step_1") / "half").write_text("")
    assert [path.name for path in begin(tmp_path, "step_1").iterdir()] == [MARK]
    (tmp_path / "step_2.incomplete").mkdir()
    (tmp_path / "step_2.incomplete" / "thesis").write_text("years")
    with pytest.raises(FileExistsError, match="no save made it"):
        begin(tmp_path, "step_2")
    assert (tmp_path / "step_2.incomplete" / "thesis").is_file()


def test_a_whole_draft_takes_no_name_that_is_taken(tmp_path: Path) -> None:
    for expected in ("a", "a.2", "a.3"):
        (tmp_path / "a.incomplete").mkdir()
        assert settle(tmp_path / "a.incomplete", tmp_path / "a").name == expected


def test_the_one_before_is_the_newest_whole_one_that_is_older(tmp_path: Path) -> None:
    for when, name in enumerate(["first", "second", "third", "fourth.incomplete", "fifth"]):
        checkpoint(tmp_path, name, when)
        os.utime(tmp_path / name / "manifest.json", (when, when))
    (tmp_path / "third" / "manifest.json").unlink()  # it never became whole
    assert before(tmp_path / "fifth") == tmp_path / "second"
    assert before(tmp_path / "first") is None
    (tmp_path / "fifth" / "manifest.json").unlink()
    assert before(tmp_path / "fifth") == tmp_path / "second"


def saved_at(folder: Path, step: int, time: float, *, keep: int = 2, tag: str = "") -> list[str]:
    """Saves a step while the clock says `time`. Returns what stays."""
    draft = begin(folder, tag or f"step_{step:06d}")
    (draft / "rank_0.json").write_text("{}")
    (draft / "manifest.json").write_text(json.dumps({"pieces": [], "step": step}))
    path = settle(draft, folder / (tag or f"step_{step:06d}"))
    for each in (path / "manifest.json", path):
        os.utime(each, (time, time))
    point_to(folder, path.name)
    rotate(folder, max_num=keep, max_mem=1e9, saved=path.name)
    return sorted(each.name for each in folder.iterdir() if each.is_dir())


@pytest.mark.parametrize("tagged", [False, True])
def test_the_last_steps_stay_whatever_the_clock_says(tagged: bool, tmp_path: Path) -> None:
    """Times that jump back by an hour, as after NTP or on another host."""
    for step, time in ((2, 9000), (4, 9010), (6, 5400), (8, 5410), (10, 5400), (12, 9020)):
        tag = f"of {step}" if tagged else ""
        left = saved_at(tmp_path, step, time, tag=tag)
        expected = [f"of {each}" if tagged else f"step_{each:06d}" for each in (step - 2, step)]
        assert left == sorted(expected[step == 2 :])
        assert newest(tmp_path) == tmp_path / expected[1]
        assert before(tmp_path / expected[1]) == (tmp_path / expected[0] if step > 2 else None)
    (tmp_path / LATEST).write_bytes(b"\0" * 11)
    assert find(tmp_path, None) == tmp_path / expected[1]


def test_a_copy_of_the_folder_keeps_its_order(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        saved_at(tmp_path / "one", step, 1000 * step, keep=5)
    shutil.copytree(tmp_path / "one", tmp_path / "other", copy_function=shutil.copy)
    for number, name in enumerate(("step_000006", "step_000002", "step_000004")):
        os.utime(tmp_path / "other" / name / "manifest.json", (number, number))
    (tmp_path / "other" / LATEST).unlink()
    assert newest(tmp_path / "other") == tmp_path / "other/step_000006"
    assert rotate(tmp_path / "other", max_num=1, max_mem=1e9) == ["step_000002", "step_000004"]


def test_what_an_earlier_one_was_resumed_instead_of_goes_first(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        saved_at(tmp_path, step, step, keep=4)
    assert saved_at(tmp_path, 6, 9, keep=3) == ["step_000004", "step_000006", "step_000006.2"]
    assert find(tmp_path, None).name == newest(tmp_path).name == "step_000006.2"  # type: ignore[union-attr]
    assert saved_at(tmp_path, 8, 10, keep=2) == ["step_000006.2", "step_000008"]


def test_a_save_that_died_goes_when_a_later_step_is_whole(tmp_path: Path) -> None:
    (begin(tmp_path, "step_000004") / "half").write_text("")
    os.utime(tmp_path / "step_000004.incomplete", (9000, 9000))
    assert saved_at(tmp_path, 2, 10) == ["step_000002", "step_000004.incomplete"]
    assert saved_at(tmp_path, 6, 20) == ["step_000002", "step_000006"]
