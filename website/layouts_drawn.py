"""Draws how ranks are arranged in a layout: python -m website.layouts_drawn writes
docs/images/layout_*.svg.

Positions of ranks come from `rftmega.runtime.parallel.layout.place_of`, and layers of a stage from
`rftmega.model_providers.description.stage_layers`, as in a run.
"""

from pathlib import Path
from typing import NamedTuple

from rftmega.config import ParallelConfig
from rftmega.model_providers.description import stage_layers
from rftmega.runtime.parallel.layout import layout_name, place_of

FOLDER = Path(__file__).parents[1] / "docs/images"
COLOURS = ("#cfe3ff", "#ffe3c2", "#d6f2d0", "#f3d3ee")  # one per data-parallel replica
WIDE, HIGH, GAP, TOP, LEFT = 118, 64, 10, 46, 86


class PILImage(NamedTuple):
    """PILImage is one diagram: a layout on a number of ranks, of a model with so many layers and
    experts.
    """

    world_size: int
    parallel: ParallelConfig
    layers: int
    experts: int = 0


IMAGES = {
    "tensor_pipeline_data": PILImage(8, ParallelConfig(tensor=2, pipeline=2), 8),
    "interleaved": PILImage(2, ParallelConfig(pipeline=2, virtual_pipeline=2), 8),
    "context": PILImage(8, ParallelConfig(tensor=2, context=2), 8),
    "experts": PILImage(8, ParallelConfig(tensor=2, sequence=True, expert=4), 8, experts=16),
}


def svg(image: PILImage) -> str:
    """Returns an SVG with a row of boxes per stage and a box per rank, coloured by data-parallel
    replica and labelled with the rank's share of the model.
    """
    parallel = image.parallel
    columns = image.world_size // parallel.pipeline
    shared = parallel.tensor * parallel.context
    width = max(LEFT + columns * (WIDE + GAP) + GAP, 320)
    height = TOP + parallel.pipeline * (HIGH + 2 * GAP) + GAP
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
        _text(GAP, 24, f"{layout_name(parallel, columns // shared)}, {image.world_size} ranks", 15),
    ]
    for stage in range(parallel.pipeline):
        y = TOP + stage * (HIGH + 2 * GAP)
        label = f"stage {stage}" if parallel.pipeline > 1 else "all layers"
        found.append(_text(GAP, y + HIGH / 2 + 4, label))
        for first in range(0, columns, parallel.tensor):
            found.append(_frame(LEFT + first * (WIDE + GAP), y, parallel.tensor))
    for rank in range(image.world_size):
        stage, within = divmod(rank, columns)
        x, y = LEFT + within * (WIDE + GAP) + GAP / 2, TOP + stage * (HIGH + 2 * GAP)
        colour = COLOURS[within // shared % len(COLOURS)]
        found.append(
            f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="4" fill="{colour}" stroke="#556"/>'
        )
        lines = [f"rank {rank}", *_holds(rank, image)]
        found += [
            _text(x + 8, y + 17 + 15 * number, line, 12 + (number == 0))
            for number, line in enumerate(lines)
        ]
    return "\n".join([*found, "</svg>"]) + "\n"


def _holds(rank: int, image: PILImage) -> list[str]:
    """Returns the text lines of a rank's box."""
    parallel = image.parallel
    place = place_of(rank, image.world_size, parallel)
    within = rank % (image.world_size // parallel.pipeline)
    parts = []
    if parallel.pipeline > 1:
        chunks = stage_layers(image.layers, parallel)[place.stage]
        spans = [f"{chunk[0]}-{chunk[-1]}" for chunk in map(list, chunks)]
        parts.append(f"layers {', '.join(spans)}")
    if parallel.tensor > 1:
        parts.append(f"matrices, part {place.tensor_rank}")
    if parallel.context > 1:
        parts.append(f"tokens, part {within // parallel.tensor % parallel.context}")
    if image.experts:
        each = image.experts // parallel.expert
        parts.append(f"experts {place.expert_rank * each}-{(place.expert_rank + 1) * each - 1}")
    return parts


def _frame(x: float, y: float, ranks: int) -> str:
    """Returns the frame around a tensor-parallel group; "" for one rank."""
    if ranks == 1:
        return ""
    return (
        f'<rect x="{x}" y="{y - 6}" width="{ranks * (WIDE + GAP)}" height="{HIGH + 12}" rx="8" '
        'fill="none" stroke="#334" stroke-width="2"/>'
    )


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}">{text}</text>'


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, image in IMAGES.items():
        (FOLDER / f"layout_{name}.svg").write_text(svg(image))


if __name__ == "__main__":
    main()
