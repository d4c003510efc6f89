"""Generates the page of the Python API: what you call, and the interfaces that you implement, from
their signatures and docstrings.
"""

import ast
import html
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = "python_api.md"
HEAD = """# Python API

Signatures and docstrings of what you call, and of the interfaces that you implement. Only the functions of
[Run a training](#run-a-training) are needed for most runs; you choose the rest in a config ([options](options.md)).
"""
CHAPTERS: dict[str, tuple[str, tuple[str, ...]]] = {  # title -> (text, import paths)
    "Run a training": (
        "`rftmega.train` is the function `train` of `rftmega.run.api`. [Quickstart](start.md) has examples.",
        ("rftmega.run.api.train", "rftmega.run.run_result.RunResult"),
    ),
    "Environments": (
        "An environment runs a task with a model and returns trajectories. [Environments](environments.md) has the rules.",
        (
            *("rftmega.core.interfaces.Environment", "rftmega.core.interfaces.Model"),
            *("rftmega.core.types.Prompt", "rftmega.core.types.Completion"),
            *("rftmega.core.types.Trajectory", "rftmega.core.types.Rollout"),
            *("rftmega.core.types.Turn", "rftmega.core.types.Sampling"),
        ),
    ),
    "Parts of an algorithm": (
        "A part is a dataclass of options and a function. [Algorithms](algorithms.md#your-own-recipes-and-parts) has an example. "
        "A reward function needs no part ([rewards](rewards.md)).",
        (
            "rftmega.config.options.parts.implements",
            "rftmega.config.options.parts.Advantage",
            "rftmega.config.options.parts.PolicyLoss",
            "rftmega.config.options.parts.ImportanceSampling",
            "rftmega.config.options.parts.RewardPart",
            "rftmega.config.options.parts.EnvironmentPart",
            "rftmega.algorithms.advantages.Scored",
            "rftmega.core.ragged.Ragged",
            "rftmega.core.ragged.by_rows",
        ),
    ),
    "Engines, models and callbacks": (
        "The trainer knows these interfaces only. Implement one to add an engine, a backend or an observer to the project "
        "([contributing](contributing.md)).",
        (
            "rftmega.core.interfaces.RolloutEngine",
            "rftmega.core.interfaces.WeightSync",
            "rftmega.core.interfaces.Scorer",
            "rftmega.core.interfaces.Policy",
            "rftmega.core.interfaces.Reward",
            "rftmega.core.interfaces.Callback",
        ),
    ),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_api_page() -> str:
    """Returns the page as Markdown: a chapter per purpose, a section per function or class."""
    parts = [HEAD]
    for title, (text, paths) in CHAPTERS.items():
        parts += [f"## {title}\n", f"{text}\n"]
        for path in paths:
            parts += section(path)
    return "\n".join(parts)


def section(path: str) -> Iterator[str]:
    """Yields the section of a function or class, given by its import path.

    Raises LookupError if its module does not define it.
    """
    module, _, name = path.rpartition(".")
    source = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | Function) and node.name == name:
            yield f"### {name}\n"
            yield f"`{path}`\n"
            yield from (
                _class(node, lines) if isinstance(node, ast.ClassDef) else _function(node, lines)
            )
            return
    raise LookupError(f"{module} defines no {name}")


def _class(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    """Yields a class: its docstring, its fields with their comments, its public methods."""
    yield from _text(node)
    methods = [item for item in node.body if isinstance(item, Function)]
    after = (node.body[0].end_lineno or 0) if ast.get_docstring(node) else node.body[0].lineno - 1
    end = _begin(methods[0]) - 1 if methods else (node.end_lineno or 0)
    fields = [line for line in lines[after:end] if line.strip()]
    yield _code([lines[node.lineno - 1], *fields])
    for method in methods:
        if not method.name.startswith("_") or method.name == "__call__":
            yield from _function(method, lines)


def _function(node: Function, lines: list[str]) -> Iterator[str]:
    """Yields a function's signature, with its decorators, and its docstring."""
    yield _code(lines[_begin(node) - 1 : _signature_end(node)])
    yield from _text(node)


def _begin(node: Function) -> int:
    """Returns the number of the first line of a function, which may be a decorator's."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _signature_end(node: Function) -> int:
    """Returns the number of the line that ends a function's signature with a colon, or the line of
    a function that is one line.
    """
    first = node.body[0].lineno
    return first if first == node.lineno else first - 1


def _text(node: ast.ClassDef | Function) -> Iterator[str]:
    if docstring := ast.get_docstring(node):
        yield escaped(docstring) + "\n"


def escaped(text: str) -> str:
    """Returns a docstring as Markdown, in which only code in backticks has a meaning."""
    parts = html.escape(text, quote=False).split("`")
    for number in range(0, len(parts), 2):
        parts[number] = parts[number].replace("*", "\\*").replace("_", "\\_")
    parts[1::2] = map(html.unescape, parts[1::2])
    return "`".join(parts)


def _code(lines: list[str]) -> str:
    """Returns lines of Python as a code block, without their common indentation."""
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(["```python", *(line[indent:] for line in lines), "```\n"])
