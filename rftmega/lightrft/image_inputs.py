"""Inserts images and videos, in the forms that LightRFT accepts, into the token ids of their
prompts.
"""

import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.core.media_positions import Frames, PlacedImage, RowImages, images_of
from rftmega.core.types import Rows
from rftmega.data.media.files import content_of, digest_of, size_of
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.data.media.videos import (
    FEWEST,
    Video,
    check_size,
    chosen_frames,
    digest_of_video,
    probed,
)
from rftmega.data.prompt_images import ImageReader, Most

Encode = Callable[[str], Sequence[int]]
ANY_NUMBER = Most(sys.maxsize, sys.maxsize)  # per prompt
UNTOLD_RATE = 2.0  # frames per second of videos given as patches, as in transformers


@dataclass(frozen=True)
class GivenImage:
    """GivenImage is an image or a video that has not been assigned a position in a prompt."""

    source: str | bytes | Tensor  # see PlacedImage
    digest: str
    grid: tuple[int, int, int]
    tokens: tuple[int, ...]  # the tokens that represent it in a prompt
    frames: Frames | None = None  # of a video only

    def at(self, start: int) -> PlacedImage:
        return PlacedImage(
            self.source, self.digest, self.grid, start, len(self.tokens), self.frames
        )


@dataclass(frozen=True)
class Patches:
    """Patches holds the patches of all rows' images and videos, concatenated in the order of the
    rows, under the names that transformers uses.
    """

    pixel_values: Tensor | None = None  # [P, C] float, of images
    image_grid_thw: Tensor | None = None  # [I, 3] int64
    pixel_values_videos: Tensor | None = None  # [Q, C] float
    video_grid_thw: Tensor | None = None  # [V, 3] int64

    @staticmethod
    def of(images: RowImages | None, processor: ImageProcessor | None) -> "Patches":
        """Returns the patches of the images in all rows. `pixel_values` (or `pixel_values_videos`)
        is None if there are no images (videos), or some are files and `processor` is None, so that
        they can't be read.
        """
        rows = () if images is None else images.rows
        held = images_of(each for row in rows for each in row)
        drawn = [each for each in held if each.frames is None]
        films = [each for each in held if each.frames is not None]
        return Patches(*_joined(drawn, processor), *_joined(films, processor))

    @staticmethod
    def held_by(given: Any) -> "Patches":
        """Returns the patches that are attributes of `given`, an object such as Samples whose
        attributes have the names of Patches' fields.
        """
        return Patches(**{name: getattr(given, name) for name in PATCHES})

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not None for name in PATCHES)


PATCHES = tuple(Patches.__dataclass_fields__)


class ImageInputs:
    """ImageInputs inserts images and videos into prompts of a vision-language model. `processor`:
    the model's.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        encode: Encode | None = None,
        *,
        most: Most = ANY_NUMBER,
        options: DataConfig | None = None,
    ):
        """`encode` tokenizes text prompts and the timestamps between video frames. `most`: maximum
        numbers of images and videos per prompt. `options`: data options that determine which frames
        of a video are used.
        """
        self.processor, self.encode, self.most = processor, encode, most
        self.options = replace(
            options or DataConfig(),
            images_key="all_images",
            media_folder="/",
            media_hosts=[],
        )
        self.reader = ImageReader(processor, self.options, "/", most)

    def read(self, images: Sequence[Any]) -> list[GivenImage]:
        """Returns the images, given as PIL images, paths, bytes, base64 (data:image/...) or
        GivenImage, as GivenImage.

        Raises DataError for any other value and for images that can't be read.
        """
        found: list[GivenImage] = []
        for image in images:
            if isinstance(image, GivenImage):
                found.append(image)
                continue
            local = isinstance(image, str) and "://" not in image and not image.startswith("data:")
            given = self.reader.sources({"all_images": os.path.abspath(image) if local else image})
            (source,) = given.images
            content = content_of(source)
            grid = self.processor.grid_of(*size_of(content))
            found.append(self._drawn(source, digest_of(content), grid))
        return found

    def read_videos(self, videos: Sequence[Any]) -> list[GivenImage]:
        """Returns the videos as GivenImage. A video is a path, of which `options` select the
        frames; or all its frames: a list of PIL images or arrays [height, width, 3], one array, or
        a tensor [T, 3, height, width]; or a GivenImage.

        Raises DataError for any other value and for videos that can't be read.
        """
        return [self._film(video) for video in videos]

    def _drawn(
        self, source: str | bytes | Tensor, digest: str, grid: tuple[int, int, int]
    ) -> GivenImage:
        tokens = (self.processor.placeholder,) * self.processor.tokens_of(grid)
        return GivenImage(source, digest, grid, tokens)

    def _film(self, given: Any) -> GivenImage:
        if isinstance(given, GivenImage):
            return given
        rate, encode = self.options.video_fps, self.encode
        assert encode is not None
        if isinstance(given, str | Path):
            path = os.path.abspath(given)
            video = probed(path, rate)
            chosen = chosen_frames(video, rate, self.options.video_frames)
            check_size(path, video, chosen)
            digest = digest_of_video(path, video.total, video.rate, chosen)
            grid = self.processor.video_grid_of(video, len(chosen))
            tokens, frames = self.processor.placed_video(grid, video, chosen, encode)
            return GivenImage(path, digest, grid, tuple(tokens), frames)
        shown = _frames(given)
        video = Video(len(shown), rate, shown.shape[2], shown.shape[1])
        check_size("a video of frames", video, range(len(shown)))
        grid = self.processor.video_grid_of(video, len(shown))
        patches = self.processor.video_patches_of(shown)
        tokens, frames = self.processor.placed_video(grid, video, range(len(shown)), encode)
        return GivenImage(patches, _digest(grid, patches), grid, tuple(tokens), frames)

    def cut(self, pixel_values: Tensor, image_grid_thw: Tensor) -> list[GivenImage]:
        """Splits the concatenated patches [P, C] of several images by their grids [I, 3] (patches
        along time, height and width). Returns the images as GivenImage.

        Raises ValueError if patches and grids don't match.
        """
        grids = [tuple(grid) for grid in image_grid_thw.tolist()]
        sizes = [time * height * width for time, height, width in grids]
        if sum(sizes) != len(pixel_values):
            raise ValueError(
                f"pixel_values has {len(pixel_values)} patches, image_grid_thw asks for {sum(sizes)}. Give those of the same "
                "images."
            )
        parts = pixel_values.detach().to("cpu", torch.float32).split(sizes)
        return [
            self._drawn(patches, _digest(grid, patches), grid)
            for patches, grid in zip(parts, grids, strict=True)
        ]

    def cut_videos(self, pixel_values_videos: Tensor, video_grid_thw: Tensor) -> list[GivenImage]:
        """Splits the concatenated patches [Q, C] of several videos by their grids [V, 3]. Returns
        the videos as GivenImage; two successive frames are assumed to last one second.

        Raises ValueError if patches and grids don't match.
        """
        assert self.encode is not None
        found = []
        for film in self.cut(pixel_values_videos, video_grid_thw):
            number = 2 * film.grid[0]
            video = Video(number, UNTOLD_RATE, 0, 0)
            tokens, frames = self.processor.placed_video(
                film.grid, video, range(number), self.encode
            )
            found.append(replace(film, tokens=tuple(tokens), frames=frames))
        return found

    def prompt(
        self, given: str | Sequence[int], images: Sequence[Any], videos: Sequence[Any] = ()
    ) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
        """Returns (token ids, media) of a prompt, given as text or token ids: the ids with one
        placeholder for each feature, and the images and videos with their positions.

        Raises DataError if placeholders and media don't match, or if there are more images or
        videos than permitted.
        """
        for noun, own, most in (
            ("image", images, self.most.images),
            ("video", videos, self.most.videos),
        ):
            if len(own) > most:
                raise DataError(
                    f"a prompt with {len(own)} {noun}s: rollout.max_{noun}s is {most}. Raise it, or leave some out."
                )
        if isinstance(given, str):
            assert self.encode is not None
            given = self.encode(self.reader.marked(given))
        return self.placed(given, self.read(images), self.read_videos(videos))

    def placed(
        self,
        ids: Sequence[int],
        images: Sequence[GivenImage],
        videos: Sequence[GivenImage] = (),
    ) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
        """Returns (token ids, media) as `prompt` does, from token ids `ids` and media that are
        already read.

        `ids` have either one placeholder for each image or video, or already all tokens that
        represent the image or video. Raises DataError if placeholders and media don't match.
        """
        ids = list(ids)
        left = {
            self.processor.placeholder: deque(images),
            self.processor.video_placeholder: deque(videos),
        }
        expanded = {
            placeholder: _is_expanded(ids, placeholder, [*given], noun)
            for (placeholder, given), noun in zip(left.items(), ("image", "video"), strict=True)
        }
        kept: list[int] = []
        placed: list[PlacedImage] = []
        place = 0
        while place < len(ids):
            token = ids[place]
            if token not in left:
                kept.append(token)
                place += 1
                continue
            own = left[token].popleft() if left[token] else None
            if own is None or not expanded[token]:
                end = place + 1
            else:
                words = own.tokens.index(token)  # that come before its first feature
                end = place - words + len(own.tokens)
                if ids[max(place - words, 0) : end] != list(own.tokens):
                    own = None
                else:
                    del kept[len(kept) - words :]
            if own is None:
                raise DataError(
                    f"the placeholders of an image or video are torn apart at token {place}. Keep them together."
                )
            placed.append(own.at(len(kept)))
            kept += own.tokens
            place = end
        return tuple(kept), tuple(placed)

    def of_rows(self, rows: Rows, patches: Patches) -> RowImages | None:
        """Returns the images and videos of each row: assigns the images and videos in `patches` to
        the placeholders in the rows' prompts, in order.

        Raises ValueError if rows and images don't match.
        """
        images = self._cut_of(patches.pixel_values, patches.image_grid_thw, "")
        videos = self._cut_of(patches.pixel_values_videos, patches.video_grid_thw, "_videos")
        found = []
        for row, end in enumerate(rows.prompt_lengths.tolist()):
            ids = rows.tokens[row, :end].tolist()
            own = self._next(ids, row, images, self.processor.placeholder, "image_grid_thw")
            films = self._next(ids, row, videos, self.processor.video_placeholder, "video_grid_thw")
            here, at = [], 0
            for film in films:
                here.append(self._film_of_row(film, ids, at))
                at = here[-1].end
            words = [0 if token == self.processor.video_placeholder else token for token in ids]
            here += self.placed(words, own)[1]
            found.append(tuple(sorted(here, key=lambda each: each.start)))
        for noun, more in (("image", images), ("video", videos)):
            if more:
                name = "image_grid_thw" if noun == "image" else "video_grid_thw"
                raise ValueError(
                    f"{name} has {len(more)} {noun}(s) more than the rows have places for. Leave them out."
                )
        return RowImages.of(found)

    def _cut_of(self, values: Tensor | None, grids: Tensor | None, kind: str) -> deque[GivenImage]:
        if (values is None) != (grids is None):
            grid = "video_grid_thw" if kind else "image_grid_thw"
            raise ValueError(f"pixel_values{kind} needs {grid}, and that needs it. Give both.")
        return deque() if values is None or grids is None else deque(self.cut(values, grids))

    def _next(
        self, ids: list[int], row: int, left: deque[GivenImage], placeholder: int, name: str
    ) -> list[GivenImage]:
        """Removes from `left` as many images as the placeholders of a row need, and returns them.
        `ids`: the row's prompt; `name`: the argument with the images, for error messages.
        """
        missing = found = ids.count(placeholder)
        own: list[GivenImage] = []
        while missing > 0 and left:
            own.append(left.popleft())
            missing -= len(own[-1].tokens)
        if missing:
            raise ValueError(
                f"row {row} has {found} placeholders (token {placeholder}), which the next of {name} don't fill. Give each row's "
                "images and videos in the order of the rows."
            )
        return own

    def _film_of_row(self, film: GivenImage, ids: list[int], at: int) -> PlacedImage:
        """Returns the video `film` with its position in the token ids `ids` of a row's prompt, at
        or after token `at`. The row has one run of placeholders for the video, or one run per
        timestamp.

        Raises ValueError if the placeholders are split into other runs.
        """
        token = self.processor.video_placeholder
        runs = film.grid[0] if self.processor.tells_times else 1
        length = len(film.tokens) // runs
        begins: list[int] = []
        for _ in range(runs):
            begin = ids.index(token, at)
            at = begin + length
            if ids[begin:at].count(token) != length:
                raise ValueError(
                    f"the placeholders of a video are torn apart at token {begin}. Keep those of a time together."
                )
            begins.append(begin)
        number = 2 * film.grid[0]
        frames = Frames(
            tuple(range(number)),
            number,
            UNTOLD_RATE,
            self.processor.step_of(number, number, UNTOLD_RATE),
            tuple(begin - begins[0] for begin in begins),
            length,
        )
        start = begins[0]
        return PlacedImage(film.source, film.digest, film.grid, start, at - start, frames)


def _is_expanded(ids: list[int], placeholder: int, given: Sequence[GivenImage], noun: str) -> bool:
    """Returns whether `ids` have one placeholder for each feature instead of one for each image or
    video in `given`.

    Raises DataError if the number of placeholders matches neither.
    """
    found = ids.count(placeholder)
    features = sum(each.tokens.count(placeholder) for each in given)
    if found not in (len(given), features):
        raise DataError(
            f"the prompt has {found} placeholder(s) (token {placeholder}) for {len(given)} {noun}(s) of {features} "
            "features. Give one each, or one a feature."
        )
    if len(given) != features or not given:
        return found == features
    first = given[0].tokens  # all have one feature: check the tokens around it
    begin = ids.index(placeholder) - first.index(placeholder)
    return ids[max(begin, 0) : begin + len(first)] == list(first)


def _joined(
    held: Sequence[PlacedImage], processor: ImageProcessor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns (patches, grids) of the images (or videos) `held`: the concatenated patches [P, C]
    and the grids [I, 3]. The patches are None if some images are files and `processor` is None;
    both are None if there are no images.
    """
    if not held:
        return None, None
    grids = torch.tensor([image.grid for image in held])
    parts: list[Tensor] = []
    for image in held:
        if isinstance(image.source, Tensor):
            parts.append(image.source)
        elif processor is not None:
            parts.append(processor.pixels(image))
    return (torch.cat(parts) if len(parts) == len(held) else None), grids


def _frames(given: Any) -> np.ndarray:
    """Returns the frames of a video as uint8 [T, height, width, 3].

    Raises DataError for frames in an unsupported form, or for fewer than FEWEST frames.
    """
    if isinstance(given, Tensor):
        if given.dim() != 4 or given.shape[1] != 3:
            raise DataError(
                f"a video of a tensor of {list(given.shape)}: [T, 3, height, width] is one."
            )
        given = given.permute(0, 2, 3, 1).round().clamp(0, 255).to("cpu", torch.uint8).numpy()
    try:
        frames = [
            each.convert("RGB") if hasattr(each, "convert") else np.asarray(each) for each in given
        ]
        found = np.stack([np.asarray(frame) for frame in frames])
    except (TypeError, ValueError) as error:
        raise DataError(f"a video is a path or a list of frames of one size: {error}.") from None
    if found.ndim != 4 or found.shape[-1] != 3 or found.dtype != np.uint8:
        raise DataError(
            f"a video of frames {found.dtype} {list(found.shape[1:])}: uint8 [height, width, 3] is a frame's."
        )
    if len(found) < FEWEST:
        raise DataError(f"a video of {len(found)} frame(s): it has at least {FEWEST}.")
    return found


def _digest(grid: tuple[int, int, int], patches: Tensor) -> str:
    content = repr(grid).encode() + patches.contiguous().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()
