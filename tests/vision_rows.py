"""Rows with pictures, laid out by transformers' own processor, for tests of models that see."""

import hashlib
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor

from rftmega.core.media_positions import PlacedPicture, RowPictures
from rftmega.core.ragged import Ragged
from rftmega.core.types import Experience, Rows
from tests.layouts import rows_of
from tests.tiny_vision import IMAGE, MERGE, VIDEO, VISION_END, VISION_START, pictures

# words, and pictures by their number: two, none, one at the very beginning, one that another row
# has, and a prompt of the same again
ROWS: tuple[tuple[str | int, ...], ...] = (
    ("ab", 0, "c", 1, "defghijklmnop"),
    ("no picture here at all",),
    (2, "qr?stuvwxyz"),
    ("x", 1, "yz 0123"),
    ("A",),
    (0, 1, 2, "!BCDEFG"),
)
PROMPTS = (22, 3, 7, 11, 1, 26)


def vision_rows(folder: Path) -> tuple[list[list[int]], list[tuple[PlacedPicture, ...]]]:
    """Returns token ids and pictures of ROWS; their patches are transformers'."""
    processor: Any = AutoImageProcessor.from_pretrained(folder, backend="torchvision")
    drawn = pictures()
    made = [processor(images=[picture], return_tensors="pt") for picture in drawn]
    tokens: list[list[int]] = []
    placed: list[tuple[PlacedPicture, ...]] = []
    for row in ROWS:
        ids: list[int] = []
        own: list[PlacedPicture] = []
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
            own.append(PlacedPicture(pixels, digest, grid, len(ids), size))
            ids += [IMAGE] * size + [VISION_END]
        tokens.append(ids)
        placed.append(tuple(own))
    return tokens, placed


def rows_with_pictures(folder: Path) -> Rows:
    tokens, placed = vision_rows(folder)
    rows = rows_of(tokens, list(PROMPTS))
    return Rows(rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask, RowPictures.of(placed))


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
        pictures=rows.pictures,
    )
    return made.ragged()


def with_files(folder: Path, placed: tuple[PlacedPicture, ...]) -> tuple[PlacedPicture, ...]:
    """Returns the pictures with a file of each in place of its patches."""
    found = []
    for picture in placed:
        (drawn,) = [each for each in pictures() if digest_of(each) == picture.digest]
        path = folder / f"{picture.digest}.png"
        if not path.is_file():
            draft = folder / f"{picture.digest}.{os.getpid()}"
            draft.write_bytes(as_png(drawn))
            draft.rename(path)
        found.append(replace(picture, source=str(path)))
    return tuple(found)


def digest_of(picture: Any) -> str:
    """The digest of the picture's file, see `with_files`."""
    return hashlib.sha256(as_png(picture)).hexdigest()


def as_png(picture: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, format="png")
    return file.getvalue()


def inputs_of(ids: list[int], placed: tuple[PlacedPicture, ...]) -> dict[str, Any]:
    """Returns what transformers' models are given of one row."""
    row = torch.tensor([ids])
    given: dict[str, Any] = {"input_ids": row}
    given["mm_token_type_ids"] = (row == IMAGE).int() + 2 * (row == VIDEO).int()
    drawn = [picture for picture in placed if picture.frames is None]
    films = [picture for picture in placed if picture.frames is not None]
    if drawn:
        given["pixel_values"] = torch.cat([picture.source for picture in drawn])
        given["image_grid_thw"] = torch.tensor([picture.grid for picture in drawn])
    if films:
        given["pixel_values_videos"] = torch.cat([film.source for film in films])
        given["video_grid_thw"] = torch.tensor([film.grid for film in films])
        seconds = [2 * f.total / (len(f.chosen) * f.rate) for film in films if (f := film.frames)]
        given["second_per_grid_ts"] = torch.tensor(seconds)
    return given


def transformers_log_probs(
    model: Any, tokens: list[list[int]], placed: list[tuple[PlacedPicture, ...]]
) -> list[torch.Tensor]:
    """Returns [length - 1] of each row, one row at a time."""
    found = []
    for ids, own in zip(tokens, placed, strict=True):
        logp = model(**inputs_of(ids, own)).logits[0].log_softmax(-1)
        targets = torch.tensor(ids[1:], dtype=torch.int64)
        found.append(logp[:-1].gather(-1, targets[:, None])[:, 0])
    return found
