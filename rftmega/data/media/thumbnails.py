"""Small pictures for people to look at."""

import base64
import io
from typing import Any

from torch import Tensor

from rftmega.core.errors import DataError
from rftmega.core.media_positions import PlacedPicture
from rftmega.data.media.files import read_picture

SIDE = 96  # pixels of the longer side, at most
QUALITY = 80  # of JPEG


def thumbnail_of(picture: PlacedPicture) -> str | None:
    """Returns a small JPEG in base64; None where the picture can't be read any more, or is there as
    patches alone.
    """
    if isinstance(picture.source, Tensor):
        return None
    try:
        small: Any = read_picture(picture.source)
    except DataError:
        return None
    small.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    small.save(file, format="JPEG", quality=QUALITY)
    return base64.b64encode(file.getvalue()).decode()
