"""Puts pictures, as users of LightRFT give them, among the tokens of their prompts."""

import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rftmega.config import DataConfig
from rftmega.data.pictures import Most, PictureReader
from rftmega.errors import DataError
from rftmega.media.files import content_of, digest_of, size_of
from rftmega.media.placed import PlacedPicture, RowPictures
from rftmega.media.processor import PictureProcessor
from rftmega.types import Rows

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class GivenPicture:
    """GivenPicture is a picture that stands nowhere yet."""

    source: str | bytes | Tensor  # see PlacedPicture
    digest: str
    grid: tuple[int, int, int]


class PictureInputs:
    """PictureInputs knows which tokens stand for a picture of the model that `processor` is of."""

    def __init__(self, processor: PictureProcessor, *, most: int = sys.maxsize):
        """`most`: pictures that a prompt may have."""
        self.processor = processor
        options = DataConfig(images_key="all_images", pictures_folder="/")
        self.most = most
        self.reader = PictureReader(processor, options, "/", Most(most, 0))

    def read(self, images: Sequence[Any]) -> list[GivenPicture]:
        """Returns pictures given as PIL's, paths, bytes, base64 (data:image/...) or GivenPicture.

        Raises DataError for what is none.
        """
        found: list[GivenPicture] = []
        for image in images:
            if isinstance(image, GivenPicture):
                found.append(image)
                continue
            local = isinstance(image, str) and "://" not in image and not image.startswith("data:")
            given = self.reader.sources({"all_images": os.path.abspath(image) if local else image})
            (source,) = given.pictures
            content = content_of(source)
            grid = self.processor.grid_of(*size_of(content))
            found.append(GivenPicture(source, digest_of(content), grid))
        return found

    def cut(self, pixel_values: Tensor, image_grid_thw: Tensor) -> list[GivenPicture]:
        """Returns the pictures whose patches [P, C] lie behind each other, of grids [I, 3].

        Raises ValueError where patches and grids don't add up.
        """
        grids = [tuple(grid) for grid in image_grid_thw.tolist()]
        sizes = [time * height * width for time, height, width in grids]
        if sum(sizes) != len(pixel_values):
            raise ValueError(
                f"pixel_values has {len(pixel_values)} patches, image_grid_thw asks for {sum(sizes)}. Give those of the same "
                "pictures."
            )
        parts = pixel_values.detach().to("cpu", torch.float32).split(sizes)
        found = []
        for patches, grid in zip(parts, grids, strict=True):
            content = repr(grid).encode() + patches.contiguous().numpy().tobytes()
            found.append(GivenPicture(patches, hashlib.sha256(content).hexdigest(), grid))
        return found

    def prompt(
        self, given: str | Sequence[int], images: Sequence[Any], encode: Encode
    ) -> tuple[tuple[int, ...], tuple[PlacedPicture, ...]]:
        """Returns the token ids of a text, or ids, with the placeholders of all features, and the
        pictures in their places.

        Raises DataError where places and pictures don't add up, or there are too many pictures.
        """
        if len(images) > self.most:
            raise DataError(
                f"a prompt with {len(images)} pictures: rollout.max_pictures is {self.most}. Raise it, or leave some out."
            )
        ids = encode(self.reader.marked(given)) if isinstance(given, str) else given
        return self.placed(ids, self.read(images))

    def placed(
        self, ids: Sequence[int], pictures: Sequence[GivenPicture]
    ) -> tuple[tuple[int, ...], tuple[PlacedPicture, ...]]:
        """Returns the same for ids that have either one placeholder a picture or as many as it has
        features.
        """
        ids, placeholder = list(ids), self.processor.placeholder
        sizes = [self.processor.tokens_of(picture.grid) for picture in pictures]
        found = ids.count(placeholder)
        if found not in (len(sizes), sum(sizes)):
            raise DataError(
                f"the prompt has {found} placeholder(s) (token {placeholder}) for {len(sizes)} picture(s) of {sum(sizes)} "
                "features. Give one each, or one a feature."
            )
        expanded = found == sum(sizes)
        kept: list[int] = []
        placed: list[PlacedPicture] = []
        place = 0
        for picture, size in zip(pictures, sizes, strict=True):
            begin = ids.index(placeholder, place)
            end = begin + (size if expanded else 1)
            if ids[begin:end].count(placeholder) != end - begin:
                raise DataError(
                    f"the placeholders of a picture of {size} features are torn apart at token {begin}. Keep them together."
                )
            kept += ids[place:begin]
            placed.append(
                PlacedPicture(picture.source, picture.digest, picture.grid, len(kept), size)
            )
            kept += [placeholder] * size
            place = end
        return tuple(kept + ids[place:]), tuple(placed)

    def of_rows(
        self, rows: Rows, pixel_values: Tensor, image_grid_thw: Tensor
    ) -> RowPictures | None:
        """Returns which of the pictures each row has: their placeholders stand in its prompt.

        Raises ValueError where rows and pictures don't add up.
        """
        left = deque(self.cut(pixel_values, image_grid_thw))
        found = []
        for row, end in enumerate(rows.prompt_lengths.tolist()):
            ids = rows.tokens[row, :end].tolist()
            missing = ids.count(self.processor.placeholder)
            own: list[GivenPicture] = []
            while missing > 0 and left:
                own.append(left.popleft())
                missing -= self.processor.tokens_of(own[-1].grid)
            if missing:
                raise ValueError(
                    f"row {row} has {ids.count(self.processor.placeholder)} placeholders, which the next pictures of "
                    "image_grid_thw don't fill. Give each row's pictures in the order of the rows."
                )
            found.append(self.placed(ids, own)[1])
        if left:
            raise ValueError(
                f"image_grid_thw has {len(left)} picture(s) more than the rows have places for. Leave them out."
            )
        return RowPictures.of(found)


def patches_of(
    pictures: RowPictures | None, processor: PictureProcessor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns pixel_values [P, C] and image_grid_thw [I, 3] of all rows' pictures, row by row.

    (None, None) without pictures; pixel_values is None where they are files and no `processor` is
    there to read them.
    """
    if pictures is None:
        return None, None
    held = [picture for row in pictures.rows for picture in row]
    grids = torch.tensor([picture.grid for picture in held])
    parts: list[Tensor] = []
    for picture in held:
        if isinstance(picture.source, Tensor):
            parts.append(picture.source)
        elif processor is not None:
            parts.append(processor.pixels(picture))
    return (torch.cat(parts) if len(parts) == len(held) else None), grids
