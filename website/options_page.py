"""Generates the page of all options from the schema of config files."""

import html
from collections.abc import Iterator
from typing import Any

from rftmega.run.json_schema import json_schema

BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}
KINDS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "array": "list",
    "object": "dictionary",
}
HEAD = """# Options

Every option of a config file, its default and what it means. This page is made from the schema that checks a run,
as are `rftmega train --help` and the schema for editors (`rftmega schema > rftmega.schema.json`).

A file has sections, as `parallel: {tensor: 2}`. The command line has dotted names, as `parallel.tensor=2`.
A file may name another as its `base`, and sets what differs. Options of a part that is not chosen are refused.
"""
TABLE = "\n| option | default | meaning |\n|---|---|---|"


def options_page() -> str:
    """Returns the page in Markdown: a chapter per section, a table per component."""
    schema = json_schema()["properties"]
    loose = {name: each for name, each in schema.items() if "properties" not in each}
    chapters = [HEAD, "## At the top", TABLE]
    chapters += [_row(name, each) for name, each in loose.items() if "anyOf" not in each]
    for name, each in schema.items():
        if "properties" in each:
            chapters += [f"\n## {name}", *_section(each, f"{name}.")]
        elif "anyOf" in each:
            chapters += [f"\n## {name}", *_union(each, name)]
    return "\n".join(chapters) + "\n"


def _section(schema: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yields the options of a section, then the sections and components within it."""
    inner = schema["properties"]
    leaves = {n: each for n, each in inner.items() if not {"properties", "anyOf"} & each.keys()}
    if leaves:
        yield TABLE
    for name, each in leaves.items():
        yield _row(prefix + name, each)
    for name, each in inner.items():
        dotted = prefix + name
        if "anyOf" in each:
            yield f"\n### {dotted}"
            yield from _union(each, dotted)
        elif dotted in ("critic.parallel", "critic.optimizer"):  # described once, with the policy's
            yield f"\n### {dotted}\n\n{_text(each['description'])} [{name}](#{name})."
        elif "properties" in each:
            yield f"\n### {dotted}\n\n{_text(each.get('description', ''))}"
            yield from _section(each, f"{dotted}.")


def _union(schema: dict[str, Any], dotted: str) -> Iterator[str]:
    """Yields a component: its description, then each of its types with its own options."""
    yield f"\n{_text(schema['description'])} Default: `{schema['default']}`."
    (whole,) = (each for each in schema["anyOf"] if "allOf" in each)
    for case in whole["allOf"]:
        tag = case["if"]["properties"]["type"]["const"]
        own = {name: each for name, each in case["then"]["properties"].items() if name != "type"}
        yield f"\n**`{dotted}: {{type: {tag}}}`** {_text(case['then']['description'])}"
        if own:
            yield TABLE
        for name, each in own.items():
            yield from _rows(f"{dotted}.{name}", each, f"{dotted}.{tag}.{name}")


def _rows(dotted: str, schema: dict[str, Any], anchor: str) -> Iterator[str]:
    """Yields the row of a component's option, or the rows of the options of a nested section."""
    if "properties" not in schema:
        yield _row(dotted, schema, anchor)
        return
    for name, each in schema["properties"].items():
        yield from _rows(f"{dotted}.{name}", each, f"{anchor}.{name}")


def _row(dotted: str, schema: dict[str, Any], anchor: str = "") -> str:
    value = schema.get("default", "required")
    shown = {True: "true", False: "false", "": "empty"}.get(value) if _plain(value) else None
    kind = (
        " or ".join(f"`{each}`" for each in schema["enum"]) if "enum" in schema else _kind(schema)
    )
    bounds = [text.format(schema[key]) for key, text in BOUNDS.items() if key in schema]
    told = f"{_text(schema['description'])} <small>({', '.join([kind, *bounds])})</small>"
    return f'| <a id="{anchor or dotted}"></a>`{dotted}` | {shown or f"`{value}`"} | {told} |'


def _plain(value: Any) -> bool:
    return isinstance(value, bool | str)


def _kind(schema: dict[str, Any]) -> str:
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    kind = " or ".join(KINDS[each] for each in types if each != "null")
    items = schema.get("items", {}).get("type")
    return f"list of {KINDS[items]}s".replace("texts", "texts") if items else kind


def _text(text: str) -> str:
    """Returns the text escaped for a table cell."""
    return (
        html.escape(text, quote=False).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
    )
