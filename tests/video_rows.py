"""Rows with images and videos, laid out by transformers' own processor, for tests of models that
see.
"""

import os
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor

from rftmega.core.media_positions import Frames, PlacedImage, RowImages
from rftmega.core.types import Rows
from rftmega.data.media.videos import digest_of_video
from tests.layouts import rows_of
from tests.tiny_vision import FILM, IMAGE, IMAGE_TEXT, VIDEO, images
from tests.vision_rows import digest_of
from tests.vision_rows import with_files as with_image_files

# frames, height, width, frames a second. The last lasts so long that transformers would put the
# words behind it amid it, which no row that is compared with transformers may have.
FILMS = ((4, 64, 96, 4.0), (8, 56, 140, 6.5), (7, 56, 56, 3.0))
TOKENS_PER_SECOND = {"qwen2_5_vl": 4}

# words, images by their number, and videos by -1 - their number
ROWS: tuple[tuple[str | int, ...], ...] = (
    ("ab", -1, "cd", 0, "efgh"),
    ("nothing to be seen here",),
    (-2, "qr?stuvwxyz"),
    (1, -1, "yz 0123"),
    (-1, -2, "!BCDEFG"),
)
COMPLETIONS = (4, 10, 5, 7, 7)  # tokens of each row that were answered
LONG_ROWS: tuple[tuple[str | int, ...], ...] = (*ROWS, ("so long ", -3, " behind it"))


def films() -> list[np.ndarray]:
    drawn = np.random.default_rng(3)
    return [drawn.integers(0, 256, (*size, 3), dtype=np.uint8) for *size, _ in FILMS]


def video_rows(
    folder: Path, rows: tuple[tuple[str | int, ...], ...] = ROWS
) -> tuple[list[list[int]], list[tuple[PlacedImage, ...]]]:
    """Returns token ids, images and videos of rows; their patches are transformers'."""
    processor: Any = AutoProcessor.from_pretrained(folder, backend="torchvision")
    tokens: list[list[int]] = []
    placed: list[tuple[PlacedImage, ...]] = []
    for row in rows:
        parts = [part for part in row if isinstance(part, int)]
        made = processed(processor, row)
        ids = made["input_ids"][0].tolist()
        runs = runs_of(ids)
        patches = {
            IMAGE: cut(made, "pixel_values", "image_grid_thw"),
            VIDEO: cut(made, "pixel_values_videos", "video_grid_thw"),
        }
        own: list[PlacedImage] = []
        for part in parts:
            kind = IMAGE if part >= 0 else VIDEO
            pixels, grid = patches[kind].pop(0)
            if kind == IMAGE:
                start, end = runs.pop(0)
                own.append(PlacedImage(pixels, digest(part), grid, start, end - start))
                continue
            tall = grid[0] if processor_is_timed(processor) else 1
            spans = [runs.pop(0) for _ in range(tall)]
            own.append(film_of(processor, ids, part, pixels, grid, spans))
        tokens.append(ids)
        placed.append(tuple(own))
    return tokens, placed


def processed(processor: Any, row: tuple[str | int, ...]) -> Any:
    drawn, shot = images(), films()
    text = "".join(
        part if isinstance(part, str) else IMAGE_TEXT if part >= 0 else FILM for part in row
    )
    numbers = [part for part in row if isinstance(part, int)]
    seen = [drawn[part] for part in numbers if part >= 0]
    shown = [shot[-1 - part] for part in numbers if part < 0]
    about = [
        {"total_num_frames": len(shot[-1 - part]), "fps": FILMS[-1 - part][3], "frames_indices": [*range(len(shot[-1 - part]))]}
        for part in numbers
        if part < 0
    ]  # fmt: skip
    given: dict[str, Any] = {}
    if seen:
        given["images"] = seen
    if shown:
        given |= {"videos": shown, "video_metadata": about, "do_sample_frames": False}
    return processor(text=[text], return_tensors="pt", **given)


def processor_is_timed(processor: Any) -> bool:
    return "Qwen3VL" in type(processor).__name__


def runs_of(ids: list[int]) -> list[tuple[int, int]]:
    """Returns where runs of placeholders begin and end."""
    found = []
    for kind, group in groupby(enumerate(ids), key=lambda each: each[1]):
        places = [place for place, _ in group]
        if kind in (IMAGE, VIDEO):
            found.append((places[0], places[-1] + 1))
    return found


def cut(made: Any, pixels: str, grids: str) -> list[tuple[torch.Tensor, Any]]:
    if grids not in made:
        return []
    sizes = made[grids].prod(1).tolist()
    shapes = [tuple(grid) for grid in made[grids].tolist()]
    return list(zip(made[pixels].split(sizes), shapes, strict=True))


def film_of(
    processor: Any,
    ids: list[int],
    part: int,
    pixels: torch.Tensor,
    grid: Any,
    spans: list[tuple[int, int]],
) -> PlacedImage:
    """Returns a video; its tokens begin with the first time in words, if it has any."""
    number, _, _, rate = FILMS[-1 - part]
    start, end = spans[0][0], spans[-1][1]
    step = 1.0
    if processor_is_timed(processor):
        start = ids[: spans[0][0]].index(ord("<") - 24, _behind(ids, spans[0][0]))
        end += 1  # of the last run
    elif "Qwen2_5" in type(processor).__name__:
        step = float(np.float32(2 / rate)) * TOKENS_PER_SECOND["qwen2_5_vl"]
    starts = tuple(first - start for first, _ in spans)
    length = spans[0][1] - spans[0][0]
    frames = Frames(tuple(range(number)), number, rate, step, starts, length)
    return PlacedImage(pixels, digest(part), grid, start, end - start, frames)


def _behind(ids: list[int], run: int) -> int:
    """Returns the place behind what opens the video before this run: "<1.2 seconds>" has 13."""
    return max(run - 16, 0)


def digest(part: int) -> str:
    return digest_of(images()[part]) if part >= 0 else f"film {-1 - part}"


def rows_with_videos(folder: Path) -> Rows:
    tokens, placed = video_rows(folder)
    rows = rows_of(tokens, prompts(folder))
    return Rows(rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask, RowImages.of(placed))


def prompts(folder: Path) -> list[int]:
    tokens, _ = video_rows(folder)
    return [len(ids) - completion for ids, completion in zip(tokens, COMPLETIONS, strict=True)]


def with_files(folder: Path, placed: tuple[PlacedImage, ...]) -> tuple[PlacedImage, ...]:
    """Returns images and videos with a file, or a folder of frames, in place of the patches."""
    found: list[PlacedImage] = []
    for each in placed:
        if each.frames is None:
            found += with_image_files(folder, (each,))
            continue
        place = folder / each.digest
        if not place.is_dir():
            draft = folder / f"{each.digest} {os.getpid()}"
            draft.mkdir()
            for number, frame in enumerate(films()[int(each.digest.split()[1])]):
                Image.fromarray(frame).save(draft / f"{number}.png")
            if not place.is_dir():
                draft.rename(place)
        frames = each.frames
        digest = digest_of_video(place, frames.total, frames.rate, frames.chosen)
        found.append(replace(each, source=str(place), digest=digest))
    return tuple(found)
