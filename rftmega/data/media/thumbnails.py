"""Small images for people to look at."""

import base64
import io
from typing import Any

from torch import Tensor

from rftmega.core.errors import DataError
from rftmega.core.media_positions import PlacedImage
from rftmega.data.media.files import read_image

SIDE = 96  # pixels of the longer side, at most
QUALITY = 80  # of JPEG


def thumbnail_of(image: PlacedImage) -> str | None:
    """Returns a small JPEG in base64; None where the image can't be read any more, or is there as
    patches alone.
    """
    if isinstance(image.source, Tensor):
        return None
    try:
        small: Any = read_image(image.source)
    except DataError:
        return None
    small.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    small.save(file, format="JPEG", quality=QUALITY)
    return base64.b64encode(file.getvalue()).decode()
