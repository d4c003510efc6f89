"""The messages on the page about troubleshooting are messages of the program."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/troubleshooting.md"
OTHER = "\0"  # what a message says of the case


def literals(path: Path) -> Iterator[str]:
    """Yields the texts of a file; what is filled in is OTHER."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (x.value if isinstance(x, ast.Constant) else OTHER for x in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%\w", OTHER, node.value)


def quoted(page: str) -> list[str]:
    """Returns the messages with which the items of the page begin."""
    return re.findall(r"^- `([^`]+)`", page, flags=re.MULTILINE)


def unknown(messages: list[str]) -> list[str]:
    """Returns the messages of which the program does not have every part."""
    texts = "\n".join(text for path in (ROOT / "rftmega").rglob("*.py") for text in literals(path))
    parts = {message: re.split("…|MASTER_ADDR=", message) for message in messages}
    return [
        message
        for message, own in parts.items()
        if any(part.strip(": .") not in texts for part in own)
    ]


def test_every_quoted_message_is_one_of_the_program() -> None:
    messages = quoted(PAGE.read_text())
    assert len(messages) > 25
    assert unknown(messages) == []


def test_a_message_that_was_changed_is_found() -> None:
    assert unknown(["the chat template reads no tools", "the chat template eats no tools"]) == [
        "the chat template eats no tools"
    ]
