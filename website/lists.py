"""Converts lists for Python-Markdown, so that they render as on GitHub.

In GitHub's CommonMark, text indented by 2 or 3 characters below an item belongs to the item.
Python-Markdown requires 4 for each level, and a blank line before a list.
"""

import re

ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])(?: +|$)")
FENCE = re.compile(r"(`{3,}|~{3,})")
LEVEL = 4  # indentation that Python-Markdown requires per level
CODE = 4  # indentation from which a line is code


def for_python_markdown(text: str) -> str:
    """Returns the text with each item's contents indented by 4 characters per level."""
    found: list[str] = []
    above: list[int] = []  # column at which the text of each open item begins
    fence = ""
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip(" "))
        if not fence and line.strip():
            within = above
            while within and indent < within[-1]:
                within = within[:-1]
            lazy = within != above and bool(found and found[-1].strip())
            rest = line[indent:]
            starts = indent - (within[-1] if within else 0) < CODE and ITEM.match(rest)
            above = above if lazy and not starts and not _block(rest) else within
        depth, inside = len(above), above[-1] if above else 0
        moved = LEVEL * depth + max(indent - inside, 0)
        rest = line[indent:]
        item = None if fence or indent - inside >= CODE else ITEM.match(rest)
        if item:
            if not depth and found and found[-1].strip() and not _in_list(found[-1], found):
                found.append("")
            begins = indent + len(item[0]) if rest[item.end() :] else indent + len(item[0]) + 1
            above = [*above, begins]
        found.append(" " * moved + rest if line.strip() else "")
        mark = FENCE.match(rest)
        if fence:
            fence = "" if mark and rest.strip() == fence else fence
        elif mark and indent - inside < CODE:
            fence = mark[1]
    return "\n".join(found) + "\n"


def _block(text: str) -> bool:
    """Returns whether a line ends a paragraph without a blank line in between."""
    return text.startswith(("#", "|", "```", "~~~", ">"))


def _in_list(last: str, found: list[str]) -> bool:
    """Returns whether the preceding line belongs to a list."""
    for line in reversed(found):
        if not line.strip():
            return False
        if ITEM.match(line.lstrip()):
            return True
        if not line.startswith(" "):
            return False
    return False
