"""Reading of videos from folders of images and from untrusted files, with limits on their size."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rftmega.core.errors import DataError
from rftmega.core.media_positions import Frames
from rftmega.data.media.files import MOST_PIXELS, content_of, read_image, size_of

# Other files are refused: FFmpeg might read a playlist and fetch its URLs.
HEADS = {
    "mp4 or mov": (4, (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
    "avi": (8, (b"AVI ",)),
    "mkv or webm": (0, (b"\x1a\x45\xdf\xa3",)),
    "mpeg": (0, (b"\x00\x00\x01\xba", b"\x00\x00\x01\xb3")),
}
FEWEST = 2  # frames; a patch spans two
MOST_FRAMES = 200_000  # of a file; all frames up to the last chosen one are decoded
MOST_SHOWN = 1_000_000_000  # pixels of all chosen frames
CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class Video:
    """Video holds a video's number of frames (`total`), frames per second (`rate`) and size in
    pixels, which are known without decoding it.
    """

    total: int  # frames
    rate: float  # frames a second
    width: int
    height: int


def probed(path: str | Path, folder_rate: float) -> Video:
    """Returns the properties of a video. `folder_rate`: frames per second of a video that is a
    folder of images.

    Raises DataError if the path can't be read, is not a video, or is a video that is too long, too
    large or too short.
    """
    path = Path(path)
    found = _folder(path, folder_rate) if path.is_dir() else _file(path)
    if found.total < FEWEST:
        raise DataError(
            f"{path} has {found.total} frame(s), and a video has at least {FEWEST}. Give one frame as an image."
        )
    if found.total > MOST_FRAMES:
        raise DataError(
            f"{path} is too long: {found.total:,} frames, and at most {MOST_FRAMES:,} are decoded. Cut it."
        )
    if found.width * found.height > MOST_PIXELS:
        raise DataError(
            f"{path} has frames of {found.width} x {found.height} pixels, and at most {MOST_PIXELS:,} are decoded. Make it "
            "smaller."
        )
    return found


def chosen_frames(video: Video, rate: float, most: int) -> tuple[int, ...]:
    """Returns the indices of the frames to use: `rate` frames per second, but at most `most`
    frames, evenly spaced from the first frame to the last.
    """
    wanted = round(video.total / video.rate * rate)
    number = min(max(wanted, FEWEST), most, video.total)
    spread = np.linspace(0, video.total - 1, number).round()
    return tuple(int(frame) for frame in spread)


def read_video(path: str, frames: Frames, digest: str) -> np.ndarray:
    """Returns the video's frames [frames, height, width, 3] in RGB. `frames`: which frames are
    used; `digest`: what `digest_of_video` returned for them before the run.

    Raises DataError if the video has changed since, or its frames can't be read.
    """
    if digest_of_video(path, frames.total, frames.rate, frames.chosen) != digest:
        raise DataError(
            f"{path} has changed since the data were read. Leave videos as they are while a run goes on, or start it anew."
        )
    return read_frames(path, frames.chosen)


def read_frames(path: str | Path, chosen: Sequence[int]) -> np.ndarray:
    """Returns the frames of a video with the indices `chosen`, [frames, height, width, 3] in RGB.

    Raises DataError if a frame can't be read, or the frames differ in size.
    """
    path = Path(path)
    if path.is_dir():
        files = _files(path)
        frames = [np.asarray(read_image(str(files[frame]))) for frame in chosen]
    else:
        frames = _decoded(path, chosen)
    sizes = {frame.shape[1::-1] for frame in frames}
    if len(sizes) > 1:
        shown = ", ".join(f"{width} x {height}" for width, height in sorted(sizes))
        raise DataError(f"{path} has frames of several sizes: {shown}. Make them alike.")
    return np.stack(frames)


def check_size(path: str | Path, video: Video, chosen: Sequence[int]) -> None:
    """Raises DataError if the frames with the indices `chosen` together have more than MOST_SHOWN
    pixels. `path`: the video's, for the error message.
    """
    pixels = len(chosen) * video.width * video.height
    if pixels > MOST_SHOWN:
        raise DataError(
            f"{path} shows {len(chosen)} frames of {video.width} x {video.height} pixels, and a video may show "
            f"{MOST_SHOWN:,} pixels. Make it smaller, or lower data.video_frames."
        )


def digest_of_video(path: str | Path, total: int, rate: float, chosen: Sequence[int]) -> str:
    """Returns a SHA-256, in hexadecimal, of a video's content (the frames with the indices `chosen`
    of a folder, or a whole file) and of the other arguments. `total`: number of frames of the
    video; `rate`: its frames per second. Returns "" for a folder that does not have `total` files.

    Raises DataError if the video can't be read.
    """
    path = Path(path)
    found = hashlib.sha256(repr((total, rate, tuple(chosen))).encode())
    if path.is_dir():
        files = _files(path)
        if len(files) != total:
            return ""
        for frame in chosen:
            found.update(hashlib.sha256(content_of(str(files[frame]))).digest())
        return found.hexdigest()
    try:
        with path.open("rb") as file:
            while part := file.read(CHUNK):
                found.update(part)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}.") from error
    return found.hexdigest()


def _folder(path: Path, rate: float) -> Video:
    files = _files(path)
    if not files:
        raise DataError(f"{path} holds no frames: it is an empty folder.")
    width, height = size_of(content_of(str(files[0])), str(files[0]))
    return Video(len(files), rate, width, height)


def _files(path: Path) -> list[Path]:
    """Returns a folder's files sorted by name, with numbers in names compared as numbers."""

    def key(file: Path) -> list[tuple[int, str]]:
        return [
            (int(part), "") if part.isdecimal() else (-1, part)
            for part in re.split(r"(\d+)", file.name)
        ]

    found = [file for file in path.iterdir() if not file.name.startswith(".")]
    return sorted(found, key=key)


def _file(path: Path) -> Video:
    import cv2

    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}.") from error
    if not head:
        raise DataError(f"{path} is empty.")
    if not any(head[place : place + 4] in marks for place, marks in HEADS.values()):
        raise DataError(
            f"{path} is no video, or of a format other than {', '.join(HEADS)}. Convert it, or give a folder of its frames."
        )
    opened = _opened(path)
    try:
        total = int(opened.get(cv2.CAP_PROP_FRAME_COUNT))
        rate = opened.get(cv2.CAP_PROP_FPS)
        width = int(opened.get(cv2.CAP_PROP_FRAME_WIDTH))
        height = int(opened.get(cv2.CAP_PROP_FRAME_HEIGHT))
    finally:
        opened.release()
    if total <= 0 or not 0 < rate < float("inf") or width <= 0 or height <= 0:
        raise DataError(
            f"{path} is broken: {total} frames of {width} x {height} pixels at {rate:g} a second. Convert it, or give a "
            "folder of its frames."
        )
    return Video(total, rate, width, height)


def _decoded(path: Path, chosen: Sequence[int]) -> list[np.ndarray]:
    """Returns the frames of a video file with the indices `chosen`. Decodes all frames up to the
    last of them, since seeking may be inexact.
    """
    import cv2

    opened = _opened(path)
    wanted = set(chosen)
    found: dict[int, np.ndarray] = {}
    try:
        for number in range(max(chosen) + 1):
            if not opened.grab():
                break
            if number in wanted:
                read, frame = opened.retrieve()
                if read:
                    found[number] = cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
    except cv2.error as error:
        raise DataError(f"{path} is broken: {error}.") from error
    finally:
        opened.release()
    if missing := sorted(wanted - found.keys()):
        raise DataError(
            f"{path} is broken: frame {missing[0]} can't be decoded. Convert it, or give a folder of its frames."
        )
    return [found[number] for number in chosen]


def _opened(path: Path) -> Any:
    import cv2

    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        opened = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
    except cv2.error as error:
        raise DataError(f"{path} can't be read as a video: {error}.") from error
    if not opened.isOpened():
        raise DataError(
            f"{path} can't be read as a video. Convert it, or give a folder of its frames."
        )
    return opened
