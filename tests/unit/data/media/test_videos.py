"""Videos: which frames are shown, and what is said where they can't be."""

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from rftmega.core.errors import DataError
from rftmega.data.media.videos import (
    Video,
    check_size,
    chosen_frames,
    digest_of_video,
    probed,
    read_frames,
)

HEIGHT, WIDTH, FRAMES, RATE = 48, 64, 12, 10.0
CODECS = {"avi": "FFV1", "mp4": "mp4v", "mkv": "FFV1"}


def drawn(frames: int = FRAMES) -> np.ndarray:
    """Returns frames that differ by their shade and by where their bar is."""
    found = np.zeros((frames, HEIGHT, WIDTH, 3), np.uint8)
    for number in range(frames):
        found[number] = (20 * number % 256, 90, 255 - 20 * number % 256)
        found[number, :, 5 * number : 5 * number + 5] = 255
    return found


def written(path: Path, frames: np.ndarray) -> Path:
    codec = cv2.VideoWriter_fourcc(*CODECS[path.suffix[1:]])  # type: ignore[attr-defined]
    writer = cv2.VideoWriter(str(path), codec, RATE, (WIDTH, HEIGHT))
    for frame in frames:
        writer.write(frame[..., ::-1])
    writer.release()
    return path


def saved(folder: Path, frames: np.ndarray) -> Path:
    folder.mkdir()
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(folder / f"frame{number}.png")
    return folder


@pytest.mark.parametrize("ending", CODECS)
def test_frames_of_a_file_are_those_that_were_written(ending: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"a.{ending}", drawn())
    assert probed(path, 1.0) == Video(FRAMES, RATE, WIDTH, HEIGHT)
    found = read_frames(path, (0, 5, 11))
    wanted = drawn()[[0, 5, 11]]
    difference = np.abs(found.astype(int) - wanted)
    assert difference.mean() < (8 if ending == "mp4" else 1)  # the others lose nothing but rounding


def test_frames_of_a_folder_are_its_images_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", drawn())
    (folder / ".hidden").write_text("nothing")
    assert probed(folder, 3.0) == Video(FRAMES, 3.0, WIDTH, HEIGHT)
    assert np.array_equal(read_frames(folder, (1, 2, 10)), drawn()[[1, 2, 10]])


@pytest.mark.parametrize(
    ("total", "rate", "asked", "most", "wanted"),
    [
        (12, 10.0, 5.0, 32, (0, 2, 4, 7, 9, 11)),
        (12, 10.0, 5.0, 3, (0, 6, 11)),
        (12, 10.0, 0.1, 32, (0, 11)),
        (4, 1.0, 30.0, 32, (0, 1, 2, 3)),
    ],
)
def test_shown_frames_are_evenly_spread(
    total: int, rate: float, asked: float, most: int, wanted: tuple[int, ...]
) -> None:
    assert chosen_frames(Video(total, rate, 8, 8), asked, most) == wanted


def test_a_digest_tells_what_is_shown_and_when(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", drawn())
    first = digest_of_video(folder, FRAMES, 2.0, (0, 4))
    assert first != digest_of_video(folder, FRAMES, 2.0, (0, 5))
    assert first != digest_of_video(folder, FRAMES, 3.0, (0, 4))
    Image.fromarray(drawn()[7]).save(folder / "frame3.png")
    assert first == digest_of_video(folder, FRAMES, 2.0, (0, 4)), "frame 3 is not shown"
    Image.fromarray(drawn()[7]).save(folder / "frame4.png")
    assert first != digest_of_video(folder, FRAMES, 2.0, (0, 4))


def test_a_digest_of_a_file_is_of_its_bytes(tmp_path: Path) -> None:
    path = written(tmp_path / "a.avi", drawn())
    other = written(tmp_path / "b.avi", drawn()[::-1])
    assert digest_of_video(path, FRAMES, RATE, (0, 4)) != digest_of_video(
        other, FRAMES, RATE, (0, 4)
    )


def image(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, format="PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.mp4", None, "none.mp4 can't be read: No such file"),
        ("empty.mp4", b"", "empty.mp4 is empty"),
        ("list.mp4", b"#EXTM3U\nhttp://example.org/a.ts\n", "is no video, or of a format other"),
        ("broken.mp4", b"\0\0\0\x1cftypisom" + bytes(100), "can't be read as a video"),
        ("nothing", {}, "holds no frames"),
        ("one", {"0.png": image((9, 9))}, "has 1 frame"),
        ("words", {"0.txt": b"words", "1.txt": b"words"}, "0.txt is no image"),
    ],
)
def test_what_is_no_video_is_said(tmp_path: Path, name: str, content: Any, said: str) -> None:
    path = tmp_path / name
    if isinstance(content, dict):
        path.mkdir()
        for file, inside in content.items():
            (path / file).write_bytes(inside)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        probed(path, 2.0)


def test_limits_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.avi", drawn())
    video = probed(path, 1.0)
    check_size(path, video, (0, 1))
    monkeypatch.setattr("rftmega.data.media.videos.MOST_SHOWN", HEIGHT * WIDTH)
    with pytest.raises(DataError, match="lower data.video_frames"):
        check_size(path, video, (0, 1))
    monkeypatch.setattr("rftmega.data.media.videos.MOST_FRAMES", FRAMES - 1)
    with pytest.raises(DataError, match="is too long: 12 frames"):
        probed(path, 1.0)
    monkeypatch.setattr("rftmega.data.media.videos.MOST_FRAMES", FRAMES)
    monkeypatch.setattr("rftmega.data.media.videos.MOST_PIXELS", HEIGHT * WIDTH - 1)
    with pytest.raises(DataError, match="frames of 64 x 48 pixels"):
        probed(path, 1.0)


def test_a_file_that_ends_early_is_broken(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (FRAMES, HEIGHT, WIDTH, 3), dtype=np.uint8)
    path = written(tmp_path / "a.avi", noise)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"frame \d+ can't be decoded"):
        read_frames(path, (0, 11))


def test_frames_of_several_sizes_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", drawn())
    (folder / "frame1.png").write_bytes(image((9, 8)))
    with pytest.raises(DataError, match="several sizes: 9 x 8, 64 x 48"):
        read_frames(folder, (0, 1))
