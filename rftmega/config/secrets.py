"""Options that hold secrets, which are left out of stored or published configs and of error
messages.

A marker in a field's annotation identifies these options (`options.secrecy`). References such as
${oc.env:NAME} are stored as written, and URLs without user, password and query.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rftmega.config.options.secrecy import Hidden, Interpolated
from rftmega.config.schema import RunConfig
from rftmega.config.task_libraries import LIBRARIES
from rftmega.config.tree import Plugins, hints, listed, walk

NOT_STORED = "(not stored)"
# tasks of a library (reasoning_gym://chain_sum?size=5) are no URL, and their parameters no secrets
_OF_URL = "".join(f"(?<!{library})" for library in LIBRARIES)
USER = re.compile(rf"({_OF_URL}://)\S*@")
# of a URL, up to the quotes and brackets that close the text around it
_END = r"[\"'\])}.,:;]*(?:\s|$)"
QUERY = re.compile(rf"({_OF_URL}://[^\s?]*)\?(?!\.\.\.{_END})\S*?(?={_END})")
# reference to a variable or option, without a default, which may be the secret itself
REFERENCE = re.compile(r"\$\{(oc\.env:)?[\w.]+\}")


def without_secrets(config: RunConfig) -> dict[str, Any]:
    """Returns the options of a config as nested dictionaries, without secrets."""
    return _section(config)


def shown(name: str, value: Any, plugins: Plugins = ()) -> str:
    """Returns "name=value" of an option for error messages; only the name if the option holds
    secrets. `plugins`: the classes of user-defined components.
    """
    if holds_secrets(name, plugins) and not isinstance(value, bool | int | float):
        return name
    return f"{name}={stored(value)}"


def stored(value: Any, hint: Any = None) -> Any:
    """Returns an option's value without secrets, as it may be stored; `hint`: the annotation of the
    option's field, which marks secrets.
    """
    if (mark := _mark(hint)) is not None and value:
        return _hidden(value, mark)
    if isinstance(value, Interpolated):
        return without_credentials(value.written)
    element = listed(hint) if hint is not None else None
    if element is not None and isinstance(value, list):
        return [_element(each, element) for each in value]
    if isinstance(value, Mapping):
        return {name: stored(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [stored(each) for each in value]
    return without_credentials(value) if isinstance(value, str) else value


def without_credentials(text: str) -> str:
    """Returns `text` with user, password and query removed from the URLs in it."""
    return QUERY.sub(r"\1?...", USER.sub(r"\1", text))


def has_credentials(address: str) -> bool:
    """Returns whether a URL contains a user or a password."""
    return USER.search(address) is not None


def hint_of(name: str, plugins: Plugins = ()) -> Any:
    """Returns the annotation of a dotted option; None if the option does not exist. `plugins`: the
    classes of user-defined components, whose options exist as well.
    """
    return _hints(plugins).get(name)


@cache
def holds_secrets(name: str, plugins: Plugins = ()) -> bool:
    """Returns whether a dotted option holds secrets, or is part of an option that holds secrets.
    `plugins`: the classes of user-defined components.
    """
    parts = name.replace("[", ".").split(".")
    above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(_bears(hint) for each in above if (hint := hint_of(each, plugins)) is not None)


def interpolated(written: Any, resolved: Any) -> Any:
    """Returns `resolved`, a tree of options in which references (${...}) are replaced by their
    values, with an Interpolated in place of each text that came from a reference. `written`: the
    same tree with the references.
    """
    if isinstance(resolved, dict) and isinstance(written, dict):
        return {name: interpolated(written.get(name), each) for name, each in resolved.items()}
    if isinstance(resolved, list) and isinstance(written, list):
        return [interpolated(*pair) for pair in zip(written, resolved, strict=True)]
    if type(resolved) is str and isinstance(written, str) and written != resolved:
        return Interpolated(resolved, written)
    if isinstance(written, str) and isinstance(resolved, dict | list):  # a whole section
        return _all_interpolated(resolved, written)
    return resolved


def resolved(tree: dict[str, Any], name: str) -> str:
    """Returns the dotted option `name` of `tree`, a stored config, as text with its references
    (${...}) resolved; as written if a reference cannot be resolved.
    """
    config = OmegaConf.create(tree)
    try:
        return str(OmegaConf.select(config, name))
    except OmegaConfBaseException:
        section, _, leaf = name.rpartition(".")
        return str(tree[section][leaf])


def _all_interpolated(resolved: Any, written: str) -> Any:
    if isinstance(resolved, dict):
        return {name: _all_interpolated(each, written) for name, each in resolved.items()}
    if isinstance(resolved, list):
        return [_all_interpolated(each, written) for each in resolved]
    return Interpolated(resolved, written) if isinstance(resolved, str) else resolved


def _section(given: Any) -> dict[str, Any]:
    """Returns name -> value in storable form of the options in `given`, an instance of an options
    dataclass; options that consist of a secret are left out.
    """
    schema: Any = type(given)
    found = {}
    for f in fields(given):
        hint, value = hints(schema)[f.name], getattr(given, f.name)
        mark = _mark(hint)
        kept = _kept(value, hint)
        if mark is None or mark.part != "all" or REFERENCE.fullmatch(str(kept)):
            found[f.name] = kept
    return found


def _kept(value: Any, hint: Any) -> Any:
    if is_dataclass(value):
        return _section(value)
    if isinstance(value, dict) and any(map(is_dataclass, value.values())):
        return {name: _section(each) for name, each in value.items()}
    if isinstance(value, list) and any(map(is_dataclass, value)):
        return [_section(each) for each in value]
    return stored(value, hint)


def _element(given: Any, schema: type) -> Any:
    """Returns the storable form of a list element, `given` as a dictionary with the fields of the
    dataclass `schema`; NOT_STORED if it is not a dictionary.
    """
    if not isinstance(given, Mapping):
        return NOT_STORED
    known = hints(schema)
    return {name: stored(value, known.get(name)) for name, value in given.items()}


def _hidden(value: Any, mark: Hidden) -> Any:
    if mark.part == "values" and isinstance(value, Mapping):
        return {name: _reference(each) for name, each in value.items()}
    if mark.part == "arguments" and isinstance(value, list):
        return [stored(value[0]), *map(_without_argument, value[1:])]
    return _reference(value)


def _reference(value: Any) -> str:
    """Returns the reference (${...}) from which a secret is read; NOT_STORED if the config contains
    the secret itself.
    """
    written = value.written if isinstance(value, Interpolated) else str(value)
    return written if REFERENCE.fullmatch(written) else NOT_STORED


def _without_argument(argument: Any) -> str:
    if (reference := _reference(argument)) != NOT_STORED:
        return reference
    name, equals, _ = str(argument).partition("=")
    if not re.fullmatch(r"--[a-z][\w-]*", name):
        return NOT_STORED
    return f"{name}={NOT_STORED}" if equals else name


def _mark(hint: Any) -> Hidden | None:
    if get_origin(hint) is not Annotated:
        return None
    return next((each for each in get_args(hint)[1:] if isinstance(each, Hidden)), None)


def _bears(hint: Any) -> bool:
    element = listed(hint)
    if element is None:
        return _mark(hint) is not None
    return any(_bears(each) for each in hints(element).values())


@cache
def _hints(plugins: Plugins) -> dict[str, Any]:
    return {option.name: option.hint for option in walk(plugins=plugins)}
