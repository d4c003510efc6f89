"""Writes images of coloured squares and discs, and train.jsonl, eval.jsonl, warm_start.jsonl: how
many are red? In swapped.jsonl the questions of eval.jsonl are paired with each other's images.

An image has 48 x 48 pixels, in 3 x 3 cells, each empty or with a shape of one of three colours. A
question names one of them; 0 to 4 shapes have it, each number equally often. No image is in more
than one line.
"""

import argparse
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (255, 0, 0), "green": (0, 160, 0), "blue": (0, 0, 255)}
SHAPES = ("square", "disc")
CELL, CELLS = 16, 3
MOST = 4  # shapes of the colour in the question
SIZES = {"eval": 200, "warm_start": 1000, "train": 2000}
Shape = tuple[str, str]  # square or disc, and its colour
Cells = tuple[Shape | None, ...]  # row by row
Line = dict[str, str | list[str]]


def write(folder: Path, *, seed: int = 0, sizes: dict[str, int] = SIZES) -> None:
    drawn = random.Random(seed)
    seen: set[Cells] = set()
    for name, size in sizes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        lines: list[Line] = []
        for number in range(size):
            colour = drawn.choice(list(COLOURS))
            cells = cells_with(number % (MOST + 1), colour, drawn)
            while cells in seen:
                cells = cells_with(number % (MOST + 1), colour, drawn)
            seen.add(cells)
            path = f"{name}/{number:04}.png"
            image(cells).save(folder / path)
            lines.append(
                {
                    "prompt": f"<image>how many {colour}?",
                    "label": str(number % (MOST + 1)),
                    "images": [path],
                }
            )
        drawn.shuffle(lines)
        save(folder / f"{name}.jsonl", lines)
        if name == "eval":
            save(folder / "swapped.jsonl", swapped(lines))


def save(file: Path, lines: list[Line]) -> None:
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")


def swapped(lines: list[Line]) -> list[Line]:
    """Returns each question with the next one's image: looking at it gives only chance accuracy."""
    following = lines[1:] + lines[:1]
    pairs = zip(lines, following, strict=True)
    return [{**line, "images": after["images"]} for line, after in pairs]


def cells_with(count: int, colour: str, drawn: random.Random) -> Cells:
    """Returns cells of which `count` have the colour; the others are empty or have another."""
    others = [None, *(other for other in COLOURS if other != colour)]
    colours: list[str | None] = [colour] * count
    colours += [drawn.choice(others) for _ in range(CELLS**2 - count)]
    drawn.shuffle(colours)
    return tuple((drawn.choice(SHAPES), each) if each else None for each in colours)


def image(cells: Cells) -> Image.Image:
    drawing = Image.new("RGB", (CELL * CELLS, CELL * CELLS), "white")
    pen = ImageDraw.Draw(drawing)
    for number, cell in enumerate(cells):
        if cell is None:
            continue
        shape, colour = cell
        row, column = divmod(number, CELLS)
        left, top = column * CELL + 2, row * CELL + 2
        draw = pen.rectangle if shape == "square" else pen.ellipse
        draw((left, top, left + CELL - 5, top + CELL - 5), fill=COLOURS[colour])
    return drawing


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/shapes/data"))
    write(parser.parse_args().folder)
