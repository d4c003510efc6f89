"""The option reference that `--help` prints, read from the schema's own source, so that it can't drift."""

import ast
import inspect

from rftmega.config import schema


def option_reference() -> str:
    """One block a section: name, default, and the docstring under the field."""
    classes = {n.name: n for n in ast.parse(inspect.getsource(schema)).body if isinstance(n, ast.ClassDef)}
    lines = []
    for section in classes["RunConfig"].body:
        if not isinstance(section, ast.AnnAssign):
            continue
        name = ast.unparse(section.target)
        lines.append(f"\n{name}:")
        body = classes[ast.unparse(section.annotation)].body
        for option, doc in zip(body, body[1:], strict=False):
            if isinstance(option, ast.AnnAssign) and isinstance(doc, ast.Expr):
                assert option.value is not None and isinstance(doc.value, ast.Constant)
                default = ast.unparse(option.value)
                shown = "required" if default == "MISSING" else default
                lines.append(f"  {name}.{ast.unparse(option.target)} = {shown}\n      {doc.value.value!s}")
    return "\n".join(lines)
