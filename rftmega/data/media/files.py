"""Reading of images from untrusted files, with limits on their size."""

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
GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N")  # 16-bit modes
GREY_32 = ("I", "F")
SHADES_16 = 65535
ORIENTATION = 0x0112  # of EXIF
SIDEWAYS = (5, 6, 7, 8)
PNG_HEAD = 8  # bytes before its first chunk
PNG_NOTES = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")  # chunks that may hold the orientation

PILImage = Any  # PIL.Image.Image, imported on use


def content_of(source: str | bytes, digest: str = "", noun: str = "image") -> bytes:
    """Returns the bytes of a file, given as a path or as bytes.

    `digest`: SHA-256 that the content must have; "" to skip the check. `noun`: type of the file
    ("image", "waveform"), for error messages. Raises DataError if the file is missing, empty, too
    large or changed.
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
    """Returns (width, height) of the upright image in a file's bytes, without decoding the image.

    Raises DataError as `read_image` does, except for damage after the file's header.
    """
    image = _opened(content, name or _name(content))
    width, height = image.size
    try:
        turned = _is_sideways(image, content)
    except Exception:  # of damaged EXIF data, which is reported when the image is decoded
        turned = False
    return (height, width) if turned else (width, height)


def read_image(source: str | bytes, digest: str = "") -> PILImage:
    """Returns the image of a file, given as a path or as bytes, upright and in RGB.

    Converts 16-bit values to 8 bits and makes transparent pixels white. `digest`: as in
    `content_of`.

    Raises DataError for a file that is truncated, has changed, is not an image or is an animated
    image, or has more than MOST_PIXELS pixels (checked before decoding).
    """
    return image_of(content_of(source, digest), _name(source))


def image_of(content: bytes, name: str | None = None) -> PILImage:
    """Returns the image in a file's bytes, converted as in `read_image`. `name` identifies the file
    in error messages.
    """
    name = name or _name(content)
    image = _opened(content, name)
    try:
        image.load()
        return _upright_in_rgb(image, name)
    except DataError:
        raise
    except Exception as error:  # a broken file makes decoders raise anything
        raise DataError(f"{name} is broken: {error}.") from error


def png_of(image: PILImage) -> bytes:
    """Returns a PIL image as the bytes of a PNG file, upright and in RGB.

    Raises DataError for an image that is animated or can't be read.
    """
    name = "an image of PIL's"
    _refuse_frames(image, name)
    file = io.BytesIO()
    try:
        _upright_in_rgb(image, name).save(file, format="PNG")
    except DataError:
        raise
    except Exception as error:  # its file may be broken
        raise DataError(f"{name} is broken: {error}.") from error
    return file.getvalue()


@cache
def _pillow() -> Any:
    """Returns the module PIL.Image, with its warning about large images disabled, since this module
    rejects them.
    """
    from PIL import Image

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    return Image


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _name(source: str | bytes, noun: str = "image") -> str:
    return f"{with_article(noun)} in the data" if isinstance(source, bytes) else source


def _file(path: str, noun: str) -> bytes:
    try:
        found = Path(path).stat()
        if not stat.S_ISREG(found.st_mode):  # reading a pipe would block
            raise DataError(f"{path} is no file. Give {with_article(noun)}'s file.")
        if found.st_size > MOST_BYTES:
            raise DataError(_too_large(path, found.st_size, noun))
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}.") from error


def _too_large(name: str, size: int, noun: str) -> str:
    return f"{name} has {size:,} bytes, and {with_article(noun)}'s file may have {MOST_BYTES:,}. Make it smaller."


def _opened(content: bytes, name: str) -> PILImage:
    from PIL import UnidentifiedImageError

    pillow = _pillow()
    try:
        image: PILImage = pillow.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise DataError(f"{name} is no image, or of a format other than {known}.") from None
    except pillow.DecompressionBombError as error:
        raise DataError(f"{name} is too large: {error}.") from error
    except Exception as error:  # a broken file makes decoders raise anything
        raise DataError(f"{name} can't be read as an image: {error}.") from error
    width, height = image.size
    if not width * height:
        raise DataError(f"{name} is an image of {width} x {height} pixels.")
    if width * height > MOST_PIXELS:
        raise DataError(
            f"{name} has {width} x {height} pixels, and at most {MOST_PIXELS:,} are decoded. Make it smaller."
        )
    _refuse_frames(image, name)
    return image


def _refuse_frames(image: PILImage, name: str) -> None:
    if image.format == "MPO":  # a camera's JPEG, followed by a preview or a gain map
        return
    try:
        frames = getattr(image, "n_frames", 1)
    except Exception as error:  # a broken file makes decoders raise anything
        raise DataError(f"{name} can't be read as an image: {error}.") from error
    if frames > 1:
        raise DataError(
            f"{name} is animated ({frames} frames). Give one image, or the frames as images."
        )


def _is_sideways(image: PILImage, content: bytes) -> bool:
    """Returns whether rotating an opened image upright swaps its width and height."""
    if image.format == "TIFF" and ORIENTATION in image.tag_v2:
        return False  # PIL has swapped them
    exif_of = _pillow().Image.getexif
    if image.format != "PNG" or _notes_follow(content):
        exif_of = type(image).getexif  # PNG's own decodes the pixels to read chunks after them
    return exif_of(image).get(ORIENTATION, 1) in SIDEWAYS


def _notes_follow(content: bytes) -> bool:
    """Returns whether a PNG file has metadata after its pixel data. A PNG chunk is a length (4
    bytes), a type (4), the data, and a checksum (4).
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


def _upright_in_rgb(image: PILImage, name: str) -> PILImage:
    from PIL import ImageOps

    pillow = _pillow()
    image = ImageOps.exif_transpose(image)
    if image.mode in GREY_32:
        raise DataError(
            f"{name} has shades of 32 bits, of which nobody says where white is. Save it with 8 or 16 bits."
        )
    if image.mode in GREY_16:
        shades = np.asarray(image).astype(np.uint32)
        shades = (shades * 255 + SHADES_16 // 2) // SHADES_16
        return pillow.fromarray(shades.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        white = pillow.new("RGBA", seen.size, (255, 255, 255, 255))
        return pillow.alpha_composite(white, seen).convert("RGB")
    return image.convert("RGB")
