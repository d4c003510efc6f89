"""The option reference that `--help` prints, read from the schema's own source, so that it can't drift."""

import ast
import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rftmega.config import schema


def option_reference() -> str:
    """One block a section: name, default, and the docstring under the field."""
    classes = {n.name: n for n in ast.parse(inspect.getsource(schema)).body if isinstance(n, ast.ClassDef)}
    lines = []
    whole = classes["RunConfig"].body
    for option, doc in _explained(whole):
        lines.append(_described("", option, doc))
    for section in whole:
        if isinstance(section, ast.AnnAssign) and (named := classes.get(ast.unparse(section.annotation))):
            name = ast.unparse(section.target)
            lines += [f"\n{name}:", *(_described(f"{name}.", *each) for each in _explained(named.body))]
    return "\n".join(lines)


def _explained(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Fields with the text under them."""
    for option, doc in pairwise(body):
        if isinstance(option, ast.AnnAssign) and isinstance(doc, ast.Expr):
            assert isinstance(doc.value, ast.Constant)
            yield option, str(doc.value.value)


def _described(prefix: str, option: ast.AnnAssign, doc: str) -> str:
    assert option.value is not None
    default = ast.unparse(option.value)
    shown = {"MISSING": "required", "field(default_factory=dict)": "{}"}.get(default, default)
    return f"  {prefix}{ast.unparse(option.target)} = {shown}\n      {doc}"
