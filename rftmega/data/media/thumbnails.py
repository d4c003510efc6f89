"""Thumbnails of images, for the display of trajectories."""

import base64
import io
from typing import Any

from torch import Tensor

from rftmega.core.errors import DataError
from rftmega.core.media_positions import PlacedImage
from rftmega.data.media.files import read_image

SIDE = 96  # maximum of the longer side, in pixels
QUALITY = 80  # of JPEG


def thumbnail_of(image: PlacedImage) -> str | None:
    """Returns a small JPEG of an image in base64; None if the image is given as patches or its file
    can't be read any more.
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
