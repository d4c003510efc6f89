"""Reads pictures from files that anybody may have made."""

import hashlib
import io
import stat
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rftmega.core.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
MOST_PIXELS = 100_000_000
MOST_BYTES = 256 * 2**20
GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N")  # modes of 16 bits
GREY_32 = ("I", "F")
SHADES_16 = 65535
ORIENTATION = 0x0112  # of EXIF
SIDEWAYS = (5, 6, 7, 8)
PNG_HEAD = 8  # bytes before its first chunk
PNG_NOTES = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")  # chunks that may tell how it lies

Picture = Any  # PIL.Image.Image, which is imported where it is needed


def content_of(source: str | bytes, digest: str = "", noun: str = "picture") -> bytes:
    """Returns the bytes of a file.

    `digest`: of what the file held before; "" where that does not matter. `noun`: what it holds, as
    errors tell it. Raises DataError where
    there is no file, or it is empty, too large or changed.
    """
    content = source if isinstance(source, bytes) else _file(source, noun)
    name = _name(source, noun)
    if not content:
        raise DataError(f"{name} is empty.")
    if len(content) > MOST_BYTES:
        raise DataError(_too_large(name, len(content), noun))
    if digest and isinstance(source, str) and digest_of(content) != digest:
        raise DataError(
            f"{name} has changed since the data were read. Leave {noun}s as they are while a run goes on, or start it anew."
        )
    return content


def digest_of(content: bytes) -> str:
    """Returns the SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def size_of(content: bytes, name: str | None = None) -> tuple[int, int]:
    """Returns width and height of the upright picture in a file's bytes, without decoding it.

    Raises DataError as `read_picture` does, but for what is broken behind the file's head.
    """
    picture = _opened(content, name or _name(content))
    width, height = picture.size
    try:
        turned = _is_sideways(picture, content)
    except Exception:  # of damaged EXIF data, which is found where the picture is decoded
        turned = False
    return (height, width) if turned else (width, height)


def read_picture(source: str | bytes, digest: str = "") -> Picture:
    """Returns the picture of a file, or of a file's bytes, upright and in RGB.

    Shades of 16 bits become 8, transparency becomes white. `digest` is as in `content_of`.

    Raises DataError for a file that can't be read whole, has changed, is no picture or an animated
    one, or is larger than MOST_PIXELS, which is decided before it is decoded.
    """
    return picture_of(content_of(source, digest), _name(source))


def picture_of(content: bytes, name: str | None = None) -> Picture:
    """Returns the picture in a file's bytes as `read_picture` does; `name`: as errors tell it."""
    name = name or _name(content)
    picture = _opened(content, name)
    try:
        picture.load()
        return _upright_in_rgb(picture, name)
    except DataError:
        raise
    except Exception as error:  # a broken file makes decoders raise anything
        raise DataError(f"{name} is broken: {error}.") from error


def png_of(picture: Picture) -> bytes:
    """Returns a PNG file's bytes of a picture of PIL's, upright and in RGB.

    Raises DataError for one that is animated or can't be read.
    """
    name = "a picture of PIL's"
    _refuse_frames(picture, name)
    file = io.BytesIO()
    try:
        _upright_in_rgb(picture, name).save(file, format="PNG")
    except DataError:
        raise
    except Exception as error:  # its file may be broken
        raise DataError(f"{name} is broken: {error}.") from error
    return file.getvalue()


@cache
def _pillow() -> Any:
    """Returns PIL.Image, which no longer warns of what is refused here."""
    from PIL import Image

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    return Image


def _name(source: str | bytes, noun: str = "picture") -> str:
    return f"a {noun} in the data" if isinstance(source, bytes) else source


def _file(path: str, noun: str) -> bytes:
    try:
        found = Path(path).stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
            raise DataError(f"{path} is no file. Give a {noun}'s file.")
        if found.st_size > MOST_BYTES:
            raise DataError(_too_large(path, found.st_size, noun))
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}.") from error


def _too_large(name: str, size: int, noun: str) -> str:
    return (
        f"{name} has {size:,} bytes, and a {noun}'s file may have {MOST_BYTES:,}. Make it smaller."
    )


def _opened(content: bytes, name: str) -> Picture:
    from PIL import UnidentifiedImageError

    image = _pillow()
    try:
        picture = image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise DataError(f"{name} is no picture, or of a format other than {known}.") from None
    except image.DecompressionBombError as error:
        raise DataError(f"{name} is too large: {error}.") from error
    except Exception as error:  # a broken file makes decoders raise anything
        raise DataError(f"{name} can't be read as a picture: {error}.") from error
    width, height = picture.size
    if not width * height:
        raise DataError(f"{name} is a picture of {width} x {height} pixels.")
    if width * height > MOST_PIXELS:
        raise DataError(
            f"{name} has {width} x {height} pixels, and at most {MOST_PIXELS:,} are decoded. Make it smaller."
        )
    _refuse_frames(picture, name)
    return picture


def _refuse_frames(picture: Picture, name: str) -> None:
    if picture.format == "MPO":  # a camera's JPEG, with a preview or a map of lights behind it
        return
    try:
        frames = getattr(picture, "n_frames", 1)
    except Exception as error:  # a broken file makes decoders raise anything
        raise DataError(f"{name} can't be read as a picture: {error}.") from error
    if frames > 1:
        raise DataError(
            f"{name} is animated ({frames} frames). Give one picture, or the frames as pictures."
        )


def _is_sideways(picture: Picture, content: bytes) -> bool:
    """Returns whether an opened picture will exchange width and height when it is made upright."""
    if picture.format == "TIFF" and ORIENTATION in picture.tag_v2:
        return False  # PIL has exchanged them
    exif_of = _pillow().Image.getexif
    if picture.format != "PNG" or _notes_follow(content):
        exif_of = type(picture).getexif  # PNG's decodes the pixels to see what is behind them
    return exif_of(picture).get(ORIENTATION, 1) in SIDEWAYS


def _notes_follow(content: bytes) -> bool:
    """Returns whether a PNG has notes behind its pixels: chunks are a length (4 bytes), a kind (4),
    so many bytes, and a sum (4).
    """
    place, pixels = PNG_HEAD, False
    while place < len(content):
        length = int.from_bytes(content[place : place + 4])
        kind = content[place + 4 : place + 8]
        if pixels and kind in PNG_NOTES:
            return True
        pixels = pixels or kind == b"IDAT"
        place += length + 12
    return False


def _upright_in_rgb(picture: Picture, name: str) -> Picture:
    from PIL import ImageOps

    image = _pillow()
    picture = ImageOps.exif_transpose(picture)
    if picture.mode in GREY_32:
        raise DataError(
            f"{name} has shades of 32 bits, of which nobody says where white is. Save it with 8 or 16 bits."
        )
    if picture.mode in GREY_16:
        shades = np.asarray(picture).astype(np.uint32)
        shades = (shades * 255 + SHADES_16 // 2) // SHADES_16
        return image.fromarray(shades.astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        seen = picture.convert("RGBA")
        white = image.new("RGBA", seen.size, (255, 255, 255, 255))
        return image.alpha_composite(white, seen).convert("RGB")
    return picture.convert("RGB")
