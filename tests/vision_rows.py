"""Rows with images, laid out by transformers' own processor, for tests of models that see."""

import hashlib
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor

from rftmega.core.media_positions import PlacedImage, RowImages
from rftmega.core.ragged import Ragged
from rftmega.core.types import Experience, Rows
from tests.layouts import rows_of
from tests.tiny_vision import IMAGE, MERGE, VIDEO, VISION_END, VISION_START, images

# words, and images by their number: two, none, one at the very beginning, one that another row
# has, and a prompt of the same again
ROWS: tuple[tuple[str | int, ...], ...] = (
    ("ab", 0, "c", 1, "defghijklmnop"),
    ("no image here at all",),
    (2, "qr?stuvwxyz"),
    ("x", 1, "yz 0123"),
    ("A",),
    (0, 1, 2, "!BCDEFG"),
)
PROMPTS = (22, 3, 7, 11, 1, 26)


def vision_rows(folder: Path) -> tuple[list[list[int]], list[tuple[PlacedImage, ...]]]:
    """Returns token ids and images of ROWS; their patches are transformers'."""
    processor: Any = AutoImageProcessor.from_pretrained(folder, backend="torchvision")
    drawn = images()
    made = [processor(images=[image], return_tensors="pt") for image in drawn]
    tokens: list[list[int]] = []
    placed: list[tuple[PlacedImage, ...]] = []
    for row in ROWS:
        ids: list[int] = []
        own: list[PlacedImage] = []
        for part in row:
            if isinstance(part, str):
                ids += [ord(letter) - 24 for letter in part]
                continue
            pixels, grid = (
                made[part]["pixel_values"],
                tuple(made[part]["image_grid_thw"][0].tolist()),
            )
            size = grid[1] * grid[2] // MERGE**2
            digest = digest_of(drawn[part])
            ids.append(VISION_START)
            own.append(PlacedImage(pixels, digest, grid, len(ids), size))
            ids += [IMAGE] * size + [VISION_END]
        tokens.append(ids)
        placed.append(tuple(own))
    return tokens, placed


def rows_with_images(folder: Path) -> Rows:
    tokens, placed = vision_rows(folder)
    rows = rows_of(tokens, list(PROMPTS))
    return Rows(rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask, RowImages.of(placed))


def experience_of(rows: Rows) -> Experience[Ragged]:
    """Returns an experience of the rows whose numbers nobody reads."""
    nothing = torch.zeros(len(rows), rows.tokens.shape[1] - 1)
    made = Experience(
        tokens=rows.tokens,
        prompt_lengths=rows.prompt_lengths,
        lengths=rows.lengths,
        mask=rows.mask,
        behaviour_logp=nothing,
        old_logp=nothing,
        reference_logp=None,
        advantage=nothing,
        images=rows.images,
    )
    return made.ragged()


def with_files(folder: Path, placed: tuple[PlacedImage, ...]) -> tuple[PlacedImage, ...]:
    """Returns the images with a file of each in place of its patches."""
    found = []
    for image in placed:
        (drawn,) = [each for each in images() if digest_of(each) == image.digest]
        path = folder / f"{image.digest}.png"
        if not path.is_file():
            draft = folder / f"{image.digest}.{os.getpid()}"
            draft.write_bytes(as_png(drawn))
            draft.rename(path)
        found.append(replace(image, source=str(path)))
    return tuple(found)


def digest_of(image: Any) -> str:
    """The digest of the image's file, see `with_files`."""
    return hashlib.sha256(as_png(image)).hexdigest()


def as_png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format="png")
    return file.getvalue()


def inputs_of(ids: list[int], placed: tuple[PlacedImage, ...]) -> dict[str, Any]:
    """Returns what transformers' models are given of one row."""
    row = torch.tensor([ids])
    given: dict[str, Any] = {"input_ids": row}
    given["mm_token_type_ids"] = (row == IMAGE).int() + 2 * (row == VIDEO).int()
    drawn = [image for image in placed if image.frames is None]
    films = [image for image in placed if image.frames is not None]
    if drawn:
        given["pixel_values"] = torch.cat([image.source for image in drawn])
        given["image_grid_thw"] = torch.tensor([image.grid for image in drawn])
    if films:
        given["pixel_values_videos"] = torch.cat([film.source for film in films])
        given["video_grid_thw"] = torch.tensor([film.grid for film in films])
        seconds = [2 * f.total / (len(f.chosen) * f.rate) for film in films if (f := film.frames)]
        given["second_per_grid_ts"] = torch.tensor(seconds)
    return given


def transformers_log_probs(
    model: Any, tokens: list[list[int]], placed: list[tuple[PlacedImage, ...]]
) -> list[torch.Tensor]:
    """Returns [length - 1] of each row, one row at a time."""
    found = []
    for ids, own in zip(tokens, placed, strict=True):
        logp = model(**inputs_of(ids, own)).logits[0].log_softmax(-1)
        targets = torch.tensor(ids[1:], dtype=torch.int64)
        found.append(logp[:-1].gather(-1, targets[:, None])[:, 0])
    return found
