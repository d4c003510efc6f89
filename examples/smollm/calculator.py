"""The tool of demo_tools.yaml."""

import re

SUM = re.compile(r"\s*(-?\d{1,6})\s*([+-])\s*(-?\d{1,6})\s*")


def calculate(expression: str) -> str:
    """Computes a sum or difference of two whole numbers.

    Args:
        expression: For example 12 + 30 or 21 - 4.
    """
    found = SUM.fullmatch(expression)
    if not found:
        raise ValueError("Write two whole numbers with + or - between them.")
    first, sign, second = found.groups()
    return str(int(first) + int(second) if sign == "+" else int(first) - int(second))
