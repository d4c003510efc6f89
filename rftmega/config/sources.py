"""Parses the notation of data sources: a path, "folder#split", "file.py:function", or several
sources with weights.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

LONGEST_CYCLE = 100_000


def split_source(source: str | Path) -> tuple[Path, str]:
    """Splits "folder#train" into (folder, "train"), and "file.py:rows" into (file.py, "rows").

    Returns (source, "") if there is no such suffix, or if a file with the whole text as its name
    exists.
    """
    for sign, suffix in (("#", ""), (":", ".py")):
        path, found, part = str(source).rpartition(sign)
        if found and path.endswith(suffix) and not Path(source).exists():
            return Path(path), part
    return Path(source), ""


def shares(weights: Sequence[float]) -> list[int]:
    """Returns the smallest integers in the ratio of `weights` (positive and finite), which are
    taken as written in decimal: 0.7, 0.3 -> 7, 3.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    return [share // math.gcd(*whole) for share in whole]
