"""Model inputs of the images and videos in a micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rftmega.core.media_positions import PlacedImage, RowImages

Load = Callable[[PlacedImage], Tensor]


@dataclass(frozen=True, slots=True)
class ImageTensors:
    """ImageTensors holds the image inputs of a micro-batch on the host: for each token [B, S] its
    position ids (time, height, width) and the 1-based index of its image feature (0: text), and the
    patches of the images.
    """

    positions: Tensor  # [B, S, 3] int64: time, height, width
    # [B, S] int64: the row of the encoder's output that replaces the token's embedding, from 1; 0:
    # none
    features: Tensor
    pixels: Tensor | None = None  # [P, C] patches of the distinct images; None if there are none
    grids: Tensor | None = None  # [I, 3] int64: patches of each along time, height and width

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Returns the keyword arguments that the first model chunk takes for images; empty if there
        is no image.
        """
        if self.pixels is None or self.grids is None:
            return {}
        return {"pixels": self.pixels, "grids": self.grids}


def image_tensors(
    images: RowImages | None, rows: int, columns: int, *, merge: int, load: Load | None
) -> ImageTensors:
    """Returns the image inputs of a micro-batch of `rows` rows of `columns` tokens; an image that
    several rows share is loaded once. `images`: the images of each row; None if there are none.

    `merge`: patches along each side of the square that becomes one feature. `load` returns an
    image's patches; None if this process does not run the vision encoder.
    """
    positions = torch.arange(columns).repeat(rows, 1)[..., None].repeat(1, 1, 3)
    features = torch.zeros(rows, columns, dtype=torch.int64)
    if images is None:
        return ImageTensors(positions, features)
    own = images.only(PlacedImage)
    distinct = {image.digest: image for row in own for image in row}
    first, total = {}, 1
    for digest, image in distinct.items():
        first[digest] = total
        total += image.features
    for number, row in enumerate(own):
        positions[number] = image_positions(row, columns, merge=merge)
        for image in row:
            number_of = first[image.digest]
            for begin, end in image.runs:
                features[number, begin:end] = torch.arange(number_of, number_of + end - begin)
                number_of += end - begin
    if load is None or not distinct:
        return ImageTensors(positions, features)
    pixels = torch.cat([load(image) for image in distinct.values()])
    grids = torch.tensor([image.grid for image in distinct.values()])
    return ImageTensors(positions, features, pixels, grids)


def image_positions(images: tuple[PlacedImage, ...], columns: int, *, merge: int) -> Tensor:
    """Returns the position ids [columns, 3] of a row of `columns` tokens with `images` (Qwen2-VL,
    arXiv:2409.12191, section 2.1). `merge`: patches along each side of the square that becomes one
    feature.

    The three positions (time, height, width) of a text token are equal and increase by one per
    token. An image's features begin at the next text position; height and width count its rows and
    columns of features, and a video's time increases by its step. Text after an image continues
    from the largest of the image's positions, as in vLLM: transformers 5.19 ignores the time, so
    that text after a long video would overlap the video.
    """
    parts: list[Tensor] = []
    at = end = 0
    for image in images:
        block = _block(image, merge)
        for first, behind in image.runs:
            parts.append(_words(at, first - end))
            at += first - end
            parts.append(at + block)
            at += int(block.max()) + 1
            end = behind
    parts.append(_words(at, max(columns - end, 0)))
    return torch.cat(parts)[:columns]


def _block(image: PlacedImage, merge: int) -> Tensor:
    """Returns the position ids [features, 3] (time, height, width, each from 0) of one contiguous
    run of an image's or video's features. `merge`: patches along each side of the square that
    becomes one feature.
    """
    time, height, width = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
    times = torch.arange(time // len(image.runs), dtype=torch.float64)
    if image.frames is not None:
        times *= image.frames.step
    return torch.cartesian_prod(times.long(), torch.arange(height), torch.arange(width))


def _words(first: int, number: int) -> Tensor:
    return torch.arange(first, first + number)[:, None].expand(-1, 3)
