"""Files that anybody may have made: what is read of them, and what is refused."""

import hashlib
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from rftmega.core.errors import DataError
from rftmega.data.media import files
from rftmega.data.media.files import digest_of, png_of, read_image, size_of

COLOURS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


def as_bytes(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **how)
    return file.getvalue()


def values(content: bytes) -> np.ndarray:
    image = read_image(content)
    assert image.mode == "RGB"
    assert size_of(content) == image.size
    return np.asarray(image)


def test_a_file_and_its_bytes_are_the_same_image(tmp_path: Path) -> None:
    content = as_bytes(Image.fromarray(COLOURS))
    (tmp_path / "a.png").write_bytes(content)
    assert np.array_equal(values(content), COLOURS)
    assert np.array_equal(np.asarray(read_image(str(tmp_path / "a.png"))), COLOURS)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_a_image_that_a_camera_turned_is_upright(turn: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    upright = {
        1: COLOURS,
        2: COLOURS[:, ::-1],
        3: COLOURS[::-1, ::-1],
        4: COLOURS[::-1],
        5: COLOURS.transpose(1, 0, 2),
        6: np.rot90(COLOURS, -1),
        7: COLOURS[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(COLOURS, 1),
    }
    how = {} if kind == "TIFF" else {"quality": 100}
    found = values(as_bytes(Image.fromarray(COLOURS), kind, exif=exif, lossless=True, **how))
    assert found.shape == upright[turn].shape
    if kind != "JPEG":
        assert np.array_equal(found, upright[turn])


def chunk(kind: bytes, inside: bytes) -> bytes:
    """A part of a PNG."""
    total = struct.pack(">I", zlib.crc32(kind + inside))
    return struct.pack(">I", len(inside)) + kind + inside + total


def test_notes_behind_the_pixels_of_a_png_turn_it_too() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = as_bytes(Image.fromarray(COLOURS))
    note = chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    found = values(plain[:-12] + note + plain[-12:])
    assert np.array_equal(found, np.rot90(COLOURS, -1))


def test_the_size_of_a_png_is_told_without_decoding_it(monkeypatch: pytest.MonkeyPatch) -> None:
    content = as_bytes(Image.fromarray(COLOURS))
    decoded: list[Any] = []
    monkeypatch.setattr(PngImageFile, "load", lambda self: decoded.append(self))
    assert size_of(content) == (7, 5)
    assert decoded == []


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_shades_of_16_bits_are_scaled_not_cut_off(kind: str) -> None:
    shades = np.array([[0, 128, 257 * 10], [257 * 200, 65534, 65535]], dtype=np.uint16)
    found = values(as_bytes(Image.fromarray(shades), kind))
    assert found[..., 0].tolist() == [[0, 0, 10], [200, 255, 255]]
    dark = np.array([[0, 100, 257]], dtype=np.uint16)
    assert values(as_bytes(Image.fromarray(dark), kind))[..., 0].tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_shades_of_32_bits_are_refused(mode: str) -> None:
    with pytest.raises(DataError, match="shades of 32 bits"):
        read_image(as_bytes(Image.new(mode, (2, 2)), "TIFF"))


def test_a_preview_behind_a_cameras_image_is_no_animation() -> None:
    both = [Image.new("RGB", (7, 5), "red"), Image.new("RGB", (3, 2), "blue")]
    content = as_bytes(both[0], "MPO", save_all=True, append_images=both[1:])
    assert values(content).shape == (5, 7, 3)
    assert np.abs(values(content).astype(int) - [255, 0, 0]).max() < 3


def test_a_image_of_pil_becomes_a_file() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.open(io.BytesIO(as_bytes(Image.fromarray(COLOURS), exif=exif)))
    assert np.array_equal(values(png_of(turned)), np.rot90(COLOURS, -1))
    assert values(png_of(Image.new("CMYK", (1, 1), (0, 255, 255, 0)))).tolist() == [[[255, 0, 0]]]
    frames = [Image.fromarray(COLOURS), Image.fromarray(255 - COLOURS)]
    moving = as_bytes(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(DataError, match="animated"):
        png_of(Image.open(io.BytesIO(moving)))
    cut = as_bytes(Image.fromarray(COLOURS.repeat(40, 0)))[:-60]
    with pytest.raises(DataError, match="broken"):
        png_of(Image.open(io.BytesIO(cut)))


def test_what_is_transparent_is_white_and_half_of_it_half() -> None:
    colours = np.array([[[200, 0, 0, 0], [200, 0, 0, 255]]], dtype=np.uint8)
    assert values(as_bytes(Image.fromarray(colours))).tolist() == [[[255, 255, 255], [200, 0, 0]]]
    grey = np.array([[[0, 0], [0, 255]]], dtype=np.uint8)
    assert values(as_bytes(Image.fromarray(grey, "LA"))).tolist() == [[[255] * 3, [0] * 3]]
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([9, 8, 7])
    assert values(as_bytes(palette)).tolist() == [[[9, 8, 7]]]
    assert values(as_bytes(palette, transparency=0)).tolist() == [[[255] * 3]]


def test_inks_become_lights() -> None:
    inks = np.array([[[0, 255, 255, 0], [0, 0, 0, 255]]], dtype=np.uint8)
    assert values(as_bytes(Image.fromarray(inks, "CMYK"), "TIFF")).tolist() == [
        [[255, 0, 0], [0] * 3]
    ]
    red = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    near = values(as_bytes(red, "JPEG", quality=100)).astype(int) - [255, 0, 0]
    assert np.abs(near).max() < 3


def png_head(width: int, height: int) -> bytes:
    """A PNG of so many pixels that has none of them."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b""))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    for width, height in ((12_000, 10_000), (20_000, 20_000), (200_000, 20_000)):
        with pytest.raises(DataError, match="pixels"):
            read_image(png_head(width, height))


def test_an_animation_is_refused() -> None:
    frames = [Image.fromarray(COLOURS), Image.fromarray(255 - COLOURS)]
    for kind in ("GIF", "PNG", "WEBP"):
        content = as_bytes(frames[0], kind, save_all=True, append_images=frames[1:])
        with pytest.raises(DataError, match=r"animated \(2 frames\)"):
            read_image(content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"<svg></svg>", "no image, or of a format other"),
        (as_bytes(Image.fromarray(COLOURS.repeat(40, 0)))[:-60], "broken"),
        (as_bytes(Image.fromarray(COLOURS.repeat(40, 0)), "JPEG")[:-60], "broken"),
        (as_bytes(Image.fromarray(COLOURS), "PPM"), "no image, or of a format other"),
        (png_head(0, 5), "can't be read as an image|no image"),
    ],
)
def test_what_is_no_whole_image_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_image(content)


def test_a_missing_and_a_huge_file_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"missing.png can't be read: No such file"):
        read_image(str(tmp_path / "missing.png"))
    monkeypatch.setattr(files, "MOST_BYTES", 10)
    (tmp_path / "huge.png").write_bytes(as_bytes(Image.fromarray(COLOURS)))
    with pytest.raises(DataError, match=r"huge.png has \d+ bytes"):
        read_image(str(tmp_path / "huge.png"))
    with pytest.raises(DataError, match=r"an image in the data has \d+ bytes"):
        read_image((tmp_path / "huge.png").read_bytes())


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for path in ("/dev/null", tmp_path, tmp_path / "pipe.png"):
        with pytest.raises(DataError, match="is no file"):
            read_image(str(path))


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(as_bytes(Image.fromarray(COLOURS)))
    digest = digest_of(path.read_bytes())
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_image(str(path), digest).size == (7, 5)
    path.write_bytes(as_bytes(Image.fromarray(255 - COLOURS)))
    with pytest.raises(DataError, match="a.png has changed since the data were read"):
        read_image(str(path), digest)
