"""Reads pictures from files that anybody may have made."""

import hashlib
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from rftmega.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
MOST_PIXELS = 100_000_000
MOST_BYTES = 256 * 2**20
GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # modes of 16 bits, or of 32 with 16 used
SHADES_16 = 65535
ORIENTATION = 0x0112  # of EXIF
SIDEWAYS = (5, 6, 7, 8)

Picture = Any  # PIL.Image.Image, which is imported where it is needed


def content_of(source: str | bytes) -> bytes:
    """Returns the bytes of a file.

    Raises DataError where there is none, or it is empty or too large.
    """
    if isinstance(source, bytes):
        content = source
    else:
        try:
            size = Path(source).stat().st_size
            if size > MOST_BYTES:
                raise DataError(
                    f"{source} has {size:,} bytes, and a picture's file may have {MOST_BYTES:,}. Make it smaller."
                )
            content = Path(source).read_bytes()
        except OSError as error:
            raise DataError(f"{source} can't be read: {error.strerror or error}.") from error
    if not content:
        name = "a picture in the data" if isinstance(source, bytes) else source
        raise DataError(f"{name} is empty.")
    return content


def digest_of(content: bytes) -> str:
    """Returns the SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def size_of(content: bytes, name: str | None = None) -> tuple[int, int]:
    """Returns width and height of the upright picture in a file's bytes, without decoding it.

    Raises DataError as `read_picture` does, but for what is broken behind the file's head.
    """
    picture = _opened(content, name or "a picture in the data")
    width, height = picture.size
    try:
        turned = picture.getexif().get(ORIENTATION, 1) in SIDEWAYS
    except Exception:  # of damaged EXIF data, which is found where the picture is decoded
        turned = False
    return (height, width) if turned else (width, height)


def read_picture(source: str | bytes) -> Picture:
    """Returns the picture of a file, or of a file's bytes, upright and in RGB.

    Shades of 16 bits become 8, transparency becomes white. Raises DataError for a file that can't be
    read whole, is no picture or an animated one, or is larger than MOST_PIXELS, which is decided
    before it is decoded.
    """
    from PIL import ImageOps

    name = "a picture in the data" if isinstance(source, bytes) else source
    picture = _opened(content_of(source), name)
    try:
        picture.load()
        upright = ImageOps.exif_transpose(picture)
    except Exception as error:  # a broken file makes decoders raise anything
        raise DataError(f"{name} is broken: {error}.") from error
    return _in_rgb(upright)


def _opened(content: bytes, name: str) -> Picture:
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a bomb, which is refused below
            picture = Image.open(io.BytesIO(content), formats=FORMATS)
        frames = getattr(picture, "n_frames", 1)
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise DataError(f"{name} is no picture, or of a format other than {known}.") from None
    except Image.DecompressionBombError as error:
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
    if frames > 1:
        raise DataError(
            f"{name} is animated ({frames} frames). Give one picture, or the frames as pictures."
        )
    return picture


def _in_rgb(picture: Picture) -> Picture:
    from PIL import Image

    if picture.mode in GREY_16:
        shades = np.asarray(picture).astype(np.int64)
        if shades.max(initial=0) > 255:
            shades = (shades.clip(0, SHADES_16) * 255 + SHADES_16 // 2) // SHADES_16
        return Image.fromarray(shades.astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        seen = picture.convert("RGBA")
        white = Image.new("RGBA", seen.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, seen).convert("RGB")
    return picture.convert("RGB")
