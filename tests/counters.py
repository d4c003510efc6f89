"""Counts the code's language: `python -m tests.counters [FOLDER]` prints the figures of
ARCHITECTURE.md's last table.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

from tests.test_language import ROOT, names_of_several_classes, riddles

ROOMS = ("rftmega", "converters", "model_providers", "tools")
CODE = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstring_lines(tree: ast.Module) -> tuple[int, set[int]]:
    """Returns the number of docstrings, and the numbers of their lines."""
    found, lines = 0, set[int]()
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node):
            found += 1
            text = node.body[0]
            lines.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return found, lines


def counted(root: Path) -> dict[str, object]:
    """Returns name -> figure for the packages under `root`."""
    tokens, lines, docstrings = 0, 0, 0
    rooms: Counter[str] = Counter()
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        text, parts = path.read_text(), path.relative_to(root).parts
        rooms[parts[1] if parts[0] == "rftmega" and len(parts) > 2 else parts[0]] += text.count(
            "\n"
        )
        found, skipped = docstring_lines(ast.parse(text))
        docstrings += found
        places = [
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type in CODE
        ]
        code = [line for line in places if line not in skipped]
        tokens += len(code)
        lines += len(set(code))
    room, size = rooms.most_common(1)[0]
    return {
        "tokens a line of code": round(tokens / lines, 2),
        "lines of code": lines,
        "docstrings": docstrings,
        "that open with Of, What, Whether, As": len(riddles(root, ROOMS)),
        "class names used twice": len(names_of_several_classes(root)),
        "lines of strategy": rooms["strategy"],
        "largest room": f"{room}, {size} lines",
    }


if __name__ == "__main__":
    for name, figure in counted(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT).items():
        sys.stdout.write(f"{name}: {figure}\n")
