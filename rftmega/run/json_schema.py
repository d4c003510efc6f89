"""Builds the JSON schema of a config file, for editors: names, types, bounds, choices, defaults and
descriptions.

The schema accepts every file that `load` can read: every option may be missing, a component may be
given by its type alone, and a component without a type may have the options of any type, since a
recipe or a base file may name the type. Whether options are consistent is checked by `--dry-run`.
"""

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING as REQUIRED
from pydantic import TypeAdapter

from rftmega.config.schema import RunConfig
from rftmega.config.tree import (
    AS_THE_POLICY,
    Plugins,
    default_type,
    hints,
    listed,
    members,
    tabled,
)
from rftmega.run.option_reference import documented

Schema = dict[str, Any]
DIALECT = "http://json-schema.org/draft-07/schema#"
BASE = {
    "type": "string",
    "default": "",
    "description": "Another config file, from this one's folder; what stands here comes first.",
}


def json_schema(plugins: Plugins = ()) -> Schema:
    """Returns the schema of a config file, including the options of `plugins` (dataclasses of the
    user's components).
    """
    whole = _section(RunConfig, "", plugins)
    whole["properties"] = {"base": BASE, **whole["properties"]}
    return {"$schema": DIALECT, "title": "A run of rftmega", **whole}


def _section(schema: type, prefix: str, plugins: Plugins) -> Schema:
    return {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": _properties(schema, prefix, plugins),
    }


def _properties(schema: Any, prefix: str, plugins: Plugins) -> Schema:
    """Returns field name -> schema for each field of the config dataclass `schema`.

    `prefix`: dotted name of the dataclass in the config, such as "trainer."; `plugins`: dataclasses
    of the user's components.
    """
    found = {}
    for f in fields(schema):
        hint, dotted = hints(schema)[f.name], prefix + f.name
        told = documented(schema).get(f.name, ("", ""))[1]
        parts, table = members(hint, plugins), tabled(hint, plugins)
        if parts:
            found[f.name] = _union(parts, dotted, plugins) | {"default": default_type(dotted)}
        elif table is not None:
            found[f.name] = {
                "type": ["object", "null"],
                "additionalProperties": False,
                "properties": {
                    tag: _section(part, f"{dotted}.{tag}.", plugins) for tag, part in table.items()
                },
            }
        elif is_dataclass(hint):
            found[f.name] = _section(hint, f"{dotted}.", plugins)  # type: ignore[arg-type]
        elif (element := listed(hint)) is not None:
            found[f.name] = {
                "type": "array",
                "items": _section(element, f"{dotted}.", plugins) | {"type": "object"},
            } | _default(f, dotted)
        else:
            found[f.name] = TypeAdapter(hint).json_schema() | _default(f, dotted)
        if told:
            found[f.name]["description"] = " ".join(told.split())
    return found


def _default(option: Field, dotted: str) -> Schema:
    """Returns {"default": value} for the dataclass field `option` with the dotted name `dotted`, or
    {} if the option is required or is one of the critic that defaults to the policy's value.
    """
    value = option.default if option.default_factory is MISSING else option.default_factory()
    the_policys = dotted.removeprefix("critic.").startswith(AS_THE_POLICY) and "critic." in dotted
    return {} if value == REQUIRED or the_policys else {"default": value}


def _union(parts: Mapping[str, type], dotted: str, plugins: Plugins) -> Schema:
    """Returns the schema of a component: either its type alone, or an object of its options. If the
    object names a type, only options of this type are valid.

    `parts`: type name -> dataclass; `dotted`: dotted name of the component.
    """
    own = {
        tag: {
            name: schema
            for name, schema in _properties(part, f"{dotted}.", plugins).items()
            if name != "type"
        }
        for tag, part in parts.items()
    }
    any_part: Schema = {"type": {"enum": list(parts)}}
    for options in own.values():
        for name, schema in options.items():
            before = any_part.setdefault(name, schema)
            if before != schema:
                any_part[name] = {"anyOf": [*before.get("anyOf", [before]), schema]}
    return {
        "anyOf": [
            {"enum": list(parts)},
            {
                "type": ["object", "null"],
                "additionalProperties": False,
                "properties": any_part,
                "allOf": [
                    {
                        "if": {"properties": {"type": {"const": tag}}, "required": ["type"]},
                        "then": {
                            "description": " ".join((inspect.getdoc(parts[tag]) or "").split()),
                            "properties": {"type": {"const": tag}, **options},
                            "additionalProperties": False,
                        },
                    }
                    for tag, options in own.items()
                ],
            },
        ]
    }
