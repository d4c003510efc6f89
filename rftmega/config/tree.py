"""The tree of options: their names and types, and the dataclasses that hold them.

Two kinds of nodes depend on the run. A union (algorithm.advantage) holds the component selected by
its `type`; a table (reward.custom) holds all user-defined components. The parameter `plugins` is a
tuple of the classes of user-defined components, see plugins.py.
"""

import types
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import Discriminator

from rftmega.config.options.parts import kind_of, type_of
from rftmega.config.schema import RunConfig

Plugins = tuple[type, ...]
# sections that the critic also has, with these as defaults
AS_THE_POLICY = ("parallel.", "optimizer.")


class Option(NamedTuple):
    """Option is one option: its dotted name, its annotation `hint`, the dataclass `owner` that has
    the field, and in a union or table the type of the component, `part` ("" elsewhere).
    """

    name: str
    hint: Any
    owner: type
    part: str

    @property
    def kind(self) -> Any:
        return plain(self.hint)


@cache
def hints(schema: type) -> dict[str, Any]:
    """Returns the annotations of a dataclass, including metadata such as bounds."""
    return get_type_hints(schema, include_extras=True)


def plain(hint: Any) -> Any:
    """Returns the type in the annotation `hint`, without bounds; str for a Literal."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return str if get_origin(hint) is Literal else hint


def choices_of(hint: Any) -> tuple[str, ...]:
    """Returns the values of a Literal; () for other annotations."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return get_args(hint) if get_origin(hint) is Literal else ()


def members(hint: Any, plugins: Plugins = ()) -> dict[str, type]:
    """Returns type name -> dataclass for an annotation that is a union of components, including
    user-defined ones (`plugins`).

    Returns {} for other annotations.
    """
    inner = plain(hint)
    if get_origin(inner) not in (Union, types.UnionType):
        return {}
    built_in = get_args(inner)
    kind = kind_of(built_in[0])
    own = [part for part in plugins if kind_of(part) is kind]
    return {type_of(part): part for part in (*built_in, *own)}


def tabled(hint: Any, plugins: Plugins = ()) -> dict[str, type] | None:
    """Returns type name -> dataclass of the user-defined components (from `plugins`) in a table
    such as reward.custom; None for an annotation that is not a table.
    """
    inner = plain(hint)
    if get_origin(inner) is not dict or not is_dataclass(get_args(inner)[1]):
        return None
    return {type_of(part): part for part in plugins if kind_of(part) is get_args(inner)[1]}


def listed(hint: Any) -> type | None:
    """Returns the dataclass of a list's elements, for an annotation list[DATACLASS]; None for other
    annotations.
    """
    inner = plain(hint)
    if get_origin(inner) is not list or not is_dataclass(get_args(inner)[0]):
        return None
    element: type = get_args(inner)[0]
    return element


def walk(
    schema: type = RunConfig, prefix: str = "", plugins: Plugins = (), part: str = ""
) -> Iterator[Option]:
    """Yields all options of the dataclass `schema`, including the options of every member of a
    union, in the order of the schema. `prefix` begins the dotted names; `plugins`: the classes of
    user-defined components; `part`: the type name of the component that `schema` describes, "" if
    it describes none.
    """
    for name, hint in hints(schema).items():
        if name not in {f.name for f in fields(schema)}:
            continue  # a ClassVar
        dotted = prefix + name
        parts, table = members(hint, plugins), tabled(hint, plugins)
        if parts:
            yield Option(f"{dotted}.type", str, schema, "")
            for tag, member in parts.items():
                yield from (
                    o
                    for o in walk(member, f"{dotted}.", plugins, tag)
                    if o.name != f"{dotted}.type"
                )
        elif table is not None:
            for tag, member in table.items():
                yield from (
                    o
                    for o in walk(member, f"{dotted}.{tag}.", plugins, tag)
                    if o.name != f"{dotted}.{tag}.type"
                )
        elif is_dataclass(hint):
            yield from walk(hint, f"{dotted}.", plugins, part)  # type: ignore[arg-type]
        else:
            yield Option(dotted, hint, schema, part)


@cache
def options(plugins: Plugins = ()) -> Mapping[str, Any]:
    """Returns dotted name -> type of all options, including the options of every member of a union,
    in the order of the schema. `plugins`: the classes of user-defined components.
    """
    return {option.name: option.kind for option in walk(plugins=plugins)}


@cache
def sections(plugins: Plugins = ()) -> Set[str]:
    """Returns the dotted names of all sections of options. `plugins`: the classes of user-defined
    components.
    """
    return {name[:at] for name in options(plugins) for at in range(len(name)) if name[at] == "."}


@cache
def unions(
    plugins: Plugins = (), schema: type = RunConfig, prefix: str = ""
) -> Mapping[str, Mapping[str, type]]:
    """Returns dotted name of a union -> {type name: dataclass of options} for all unions in the
    dataclass `schema`. `plugins`: the classes of user-defined components; `prefix` begins the
    dotted names.
    """
    found: dict[str, Mapping[str, type]] = {}
    for f in fields(schema):
        hint = hints(schema)[f.name]
        parts = members(hint, plugins)
        if parts:
            found[prefix + f.name] = parts
        elif is_dataclass(hint):
            found |= unions(plugins, hint, f"{prefix}{f.name}.")  # type: ignore[arg-type]
    return found


def value_of(config: RunConfig, name: str) -> Any:
    """Returns the value of a dotted option; a number in the name is the index of a list element."""
    value: Any = config
    for leaf in name.split("."):
        if isinstance(value, list):
            value = value[int(leaf)]
        else:
            value = value[leaf] if isinstance(value, Mapping) else getattr(value, leaf)
    return value


def default_type(name: str) -> str:
    """Returns the default type of the union `name`."""
    schema: Any = RunConfig
    *sections, leaf = name.split(".")
    for section in sections:
        schema = hints(schema)[section]
    chosen = next(f for f in fields(schema) if f.name == leaf).default_factory
    return type_of(chosen)  # type: ignore[arg-type]


def rebuilt(
    schema: type, hint_of: Callable[[str, Any], Any], plugins: Plugins = (), prefix: str = ""
) -> type:
    """Returns a dataclass like `schema` in which each field has the annotation hint_of(dotted name,
    annotation); a dataclass returned by `hint_of` is rebuilt as well. `plugins`: the classes of
    user-defined components; `prefix` begins the dotted names.
    """
    made = []
    for f in fields(schema):
        dotted = prefix + f.name
        hint = hint_of(dotted, hints(schema)[f.name])
        table = tabled(hint, plugins)
        if table is not None:
            inner = [
                (tag, rebuilt(part, hint_of, plugins, f"{dotted}.{tag}."))
                for tag, part in table.items()
            ]
            hint = make_dataclass(
                f.name, [(tag, part, field(default_factory=part)) for tag, part in inner]
            )
            made.append((f.name, hint, field(default_factory=hint)))
        elif is_dataclass(hint):
            hint = rebuilt(hint, hint_of, plugins, f"{dotted}.")  # type: ignore[arg-type]
            made.append((f.name, hint, field(default_factory=hint)))
        elif (element := listed(hint)) is not None:
            inner_type = rebuilt(element, hint_of, plugins, f"{dotted}.")
            made.append((f.name, list[inner_type], field(default_factory=f.default_factory)))  # type: ignore[valid-type, arg-type]
        elif f.default_factory is not MISSING:
            made.append((f.name, hint, field(default_factory=f.default_factory)))
        else:
            made.append((f.name, hint, field(default=f.default)))
    return make_dataclass(schema.__name__, made)


def merged_schema(chosen: Mapping[str, str], plugins: Plugins) -> type:
    """Returns the schema for OmegaConf: without bounds, and with the component of type chosen[name]
    for the union `name`. `plugins`: the classes of user-defined components.
    """
    known = unions(plugins)

    def hint_of(name: str, hint: Any) -> Any:
        if name in known:
            return known[name][chosen[name]]
        return plain(hint)

    return rebuilt(RunConfig, hint_of, plugins)


def bounded_schema(plugins: Plugins) -> type:
    """Returns the schema for pydantic: with bounds, choices, and unions (selected by `type`) that
    include user-defined components (`plugins`).
    """
    known = unions(plugins)

    def hint_of(name: str, hint: Any) -> Any:
        if name not in known:
            return hint
        return Annotated[Union[tuple(known[name].values())], Discriminator("type")]  # noqa: UP007

    return rebuilt(RunConfig, hint_of, plugins)


def built(schema: Any, tree: Mapping[str, Any], plugins: Plugins) -> Any:
    """Returns an instance of the dataclass `schema` with the values of the nested dictionaries
    `tree`. `plugins`: the classes of user-defined components.

    For a union, builds the component that its `type` selects.
    """
    values = {}
    for f in fields(schema):
        hint, value = hints(schema)[f.name], tree[f.name]
        parts, table = members(hint, plugins), tabled(hint, plugins)
        if parts:
            value = built(parts[value["type"]], value, plugins)
        elif table is not None:
            value = {tag: built(part, value[tag], plugins) for tag, part in table.items()}
        elif is_dataclass(hint):
            value = built(hint, value, plugins)
        elif (element := listed(hint)) is not None:
            value = [built(element, each, plugins) for each in value]
        values[f.name] = value
    return schema(**values)
