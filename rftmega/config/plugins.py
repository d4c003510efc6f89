"""User-defined components from the Python files that `plugins` names."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_args, get_origin

from rftmega.config.options.parts import IMPLEMENTATIONS, KINDS, kind_of, type_of
from rftmega.config.tree import hints, members, plain, unions
from rftmega.config.user_code.python_files import module_of
from rftmega.core.errors import ConfigError


def plugin_parts(paths: Sequence[str]) -> tuple[type, ...]:
    """Returns the option dataclasses of all components in the files `paths`.

    Raises ConfigError for a file that is missing or broken, and for a component that has no
    implementation, or the same type name as another component of its kind.
    """
    found: list[type] = []
    for path in dict.fromkeys(str(Path(path).resolve()) for path in paths):
        found += _parts_in(module_of(path, "plugins"), path)
    taken = dict.fromkeys(_built_in(), "built in")
    for part in found:
        kind, file = kind_of(part), inspect.getfile(part)
        other = taken.setdefault((kind, type_of(part)), file)
        if other != file:
            raise ConfigError(
                f"plugins: {file} has a part of type {type_of(part)}, which is {other} already. Name it otherwise."
            )
    return tuple(found)


def _built_in() -> Iterable[tuple[type | None, str]]:
    for parts in unions().values():
        for name, part in parts.items():
            yield kind_of(part), name


@cache
def _parts_in(module: ModuleType, path: str) -> tuple[type, ...]:
    parts = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and kind_of(value)
    ]
    for part in parts:
        _check(part, path)
    if not parts:
        names = ", ".join(kind.__name__ for kind in KINDS)
        raise ConfigError(
            f"plugins: {path} has no part: no dataclass that inherits from one of {names}."
        )
    return tuple(parts)


def _check(part: type, path: str) -> None:
    where = f"plugins: {path}: {part.__name__}"
    if "__dataclass_fields__" not in vars(part):
        raise ConfigError(f"{where} is no dataclass. Write @dataclass(frozen=True) above it.")
    assert is_dataclass(part)
    literal = get_args(hints(part).get("type")) if type_of(part) else ()
    if literal != (type_of(part),):
        raise ConfigError(
            f'{where} has no type. Give it a field, as type: Literal["my_part"] = "my_part".'
        )
    if part not in IMPLEMENTATIONS:
        raise ConfigError(f"{where} has no function. Write @implements({part.__name__}) above one.")
    for f in fields(part):
        hint = hints(part)[f.name]
        kind = plain(hint)
        if (
            members(hint)
            or kind not in (int, float, bool, str)
            and get_origin(kind) not in (list, dict)
        ):
            raise ConfigError(
                f"{where}.{f.name} must be a number, true or false, text, a list or a dictionary."
            )
        if f.name != "type" and f.default is f.default_factory:
            raise ConfigError(f"{where}.{f.name} needs a default.")
