"""Counts the code's language: `python -m tests.counters [FOLDER]` prints the figures of
ARCHITECTURE.md's last table.
"""

import ast
import io
import re
import sys
import tokenize
from functools import cache
from pathlib import Path

from tests.test_language import ROOT, names_of_several_classes, riddles
from tests.test_layering import imported

PACKAGES = ("rftmega", "converters", "model_providers", "tools")
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


def graph_of_subpackages(root: Path) -> dict[str, set[str]]:
    """Returns subpackage -> the other ones that its files import."""
    found: dict[str, set[str]] = {}
    for module, targets in imported(root).items():
        own = module.partition("/")[0]
        found.setdefault(own, set()).update(to.partition("/")[0] for to in targets)
    return {own: targets - {own} for own, targets in found.items()}


def levels(edges: dict[str, set[str]]) -> int:
    """Returns the length of the longest chain of imports."""

    @cache
    def level(name: str) -> int:
        return 1 + max((level(to) for to in edges[name]), default=0)

    return max(map(level, edges))


def share_of_any(trees: list[ast.Module]) -> float:
    """Returns the share of annotated arguments whose whole annotation is Any."""
    found = [
        argument.annotation
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.annotation is not None
    ]
    return sum(ast.unparse(each) == "Any" for each in found) / len(found)


def first_sentences(trees: list[ast.Module]) -> list[str]:
    documented = (
        ast.get_docstring(node)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, Documented)
    )
    return [re.split(r"[.;:]\s|\n\n", text, maxsplit=1)[0] for text in documented if text]


def counted(root: Path) -> dict[str, object]:
    """Returns name -> figure for the packages under `root`."""
    files = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    trees = [ast.parse(path.read_text()) for path in files]
    tokens, lines = 0, 0
    for path, tree in zip(files, trees, strict=True):
        _, skipped = docstring_lines(tree)
        places = [
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
            if token.type in CODE
        ]
        code = [line for line in places if line not in skipped]
        tokens += len(code)
        lines += len(set(code))
    edges = graph_of_subpackages(root)
    sentences = first_sentences(trees)
    entries = [path.name for path in (root / "rftmega").iterdir() if path.name != "__pycache__"]
    return {
        "entries of rftmega/": len(entries),
        "subpackages that import each other": len(edges),
        "levels": levels(edges),
        "edges": sum(map(len, edges.values())),
        "lines of code": lines,
        "tokens a line of code": round(tokens / lines, 2),
        "share of Any in arguments": f"{share_of_any(trees):.1%}",
        "docstrings": len(sentences),
        'of them with "what" in the first sentence': sum(
            bool(re.search(r"\b[Ww]hat\b", sentence)) for sentence in sentences
        ),
        "that open with Of, What, Whether, As": len(riddles(root, PACKAGES)),
        "class names used twice": len(names_of_several_classes(root)),
    }


if __name__ == "__main__":
    for name, figure in counted(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT).items():
        sys.stdout.write(f"{name}: {figure}\n")
