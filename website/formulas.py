"""Renders formulas as SVG when the site is built, so that a page needs no script and no network.

A formula is a fenced block of `math`, in the TeX subset of GitHub and matplotlib's mathtext.
"""

import html
import logging
from functools import cache
from typing import Any

from matplotlib import rc_context
from matplotlib.path import Path
from matplotlib.textpath import TextPath

SIZE = 19  # font size in pixels
MARGIN = 2
COMMANDS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}


def block(source: str, *_: Any, **__: Any) -> str:
    """Returns the HTML of a fenced block, for pymdownx.superfences, which shows a block that raises
    as code. So an error is also logged, and --strict fails the build.
    """
    try:
        return f'<div class="formula">{svg(" ".join(source.split()))}</div>'
    except ValueError as error:
        logging.getLogger("mkdocs.formulas").warning(f"{source.strip()}: {error}")
        raise


@cache
def svg(formula: str) -> str:
    """Returns the formula as one path, in the colour of the surrounding text.

    Raises ValueError if mathtext can't parse it.
    """
    with rc_context({"mathtext.fontset": "stix"}):
        drawn = TextPath((0, 0), f"${formula}$", size=SIZE)
    box = drawn.get_extents()
    left, top = box.x0 - MARGIN, -box.y1 - MARGIN
    width, height = box.width + 2 * MARGIN, box.height + 2 * MARGIN
    return (
        f'<svg role="img" aria-label="{html.escape(formula, quote=True)}" fill="currentColor" '
        f'width="{width:.1f}" height="{height:.1f}" viewBox="{left:.1f} {top:.1f} {width:.1f} {height:.1f}" '
        f'xmlns="http://www.w3.org/2000/svg"><path d="{_outline(drawn)}"/></svg>'
    )


def _outline(drawn: Path) -> str:
    """Returns the path's SVG commands. SVG's y axis points down."""
    found = []
    for points, code in drawn.iter_segments(simplify=False):
        if code == Path.CLOSEPOLY:
            found.append("Z")
            continue
        pairs = points.reshape(-1, 2)
        found.append(COMMANDS[code] + " ".join(f"{x:.2f} {-y:.2f}" for x, y in pairs))
    return "".join(found)
