"""The calculator tool of this example."""

import re


def calculate(expression: str) -> str:
    """Multiplies two whole numbers.

    Args:
        expression: Two numbers with a * between them, as 12*34.
    """
    found = re.fullmatch(r"(\d{1,6})\*(\d{1,6})", expression)
    if found is None:
        raise ValueError("write two numbers with a * between them, as 12*34")
    return str(int(found[1]) * int(found[2]))
