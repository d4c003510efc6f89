"""Reads the YAML files of a config: the given file and the files that it names as `base`."""

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rftmega.core.errors import ConfigError

MOST_VALUES = 100_000  # maximum per document; repeated anchors can expand to more
UNUSABLE = re.compile("[\ud800-\udfff\0]")  # halves of characters, and the end of a file's name
Given = str | Path | Mapping[str, Any]


class Layer(NamedTuple):
    """Layer is one file of a config: `folder`, the file's folder, and `tree`, its sections of
    options.
    """

    folder: Path
    tree: dict[str, Any]


class StrictLoader(yaml.SafeLoader):
    """StrictLoader reads YAML and rejects a mapping in which a key occurs twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Returns the mapping; raises a YAML error with the line of a key's second occurrence."""
        seen: list[Any] = []
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is there twice", key_node.start_mark
                )
            seen.append(key)
        return super().construct_mapping(node, deep=deep)


def read_yaml(text: str) -> Any:
    """Returns the content of a YAML text with a single document.

    Raises a YAML error for invalid YAML; ValueError for an invalid date or number, for a value that
    contains itself or is too large, and for a text that no file can hold or be named by.
    """
    loader = StrictLoader(text)
    try:
        document = loader.get_single_data()
    finally:
        loader.dispose()
    _refuse_unusable(document)
    return document


def _refuse_unusable(document: Any) -> None:
    """Raises ValueError if a list or dictionary contains itself, or expands to more than
    MOST_VALUES values, and for a text with a lone surrogate or a NUL.
    """
    above: list[int] = []  # the lists and dictionaries around the current value
    waiting: list[tuple[Any, int]] = [(document, 0)]
    seen = 0
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if seen > MOST_VALUES:
            raise ValueError(
                f"it has more than {MOST_VALUES} values. Do its anchors (&) repeat each other (*)?"
            )
        if isinstance(value, str) and (found := UNUSABLE.search(value)):
            raise ValueError(f"a text contains {found[0]!r}, which is no character. Remove it.")
        if not isinstance(value, Mapping | list | set | tuple):
            continue
        del above[depth:]
        if id(value) in above:
            raise ValueError("an anchor (&) holds itself (*). Write out what it is to hold.")
        above.append(id(value))
        inner = [*value, *value.values()] if isinstance(value, Mapping) else value
        waiting += [(each, depth + 1) for each in inner]


def layers_of(given: Given) -> list[Layer]:
    """Returns the files of a config as layers: the file named as `base` before the file that names
    it. `given`: the path of a YAML file, or a dictionary, which is treated as a file in the working
    directory.

    Raises ConfigError for a file that cannot be read.
    """
    return list(_layers(Path() if isinstance(given, Mapping) else Path(given), given))


def _layers(path: Path, given: Given, below: tuple[Path, ...] = ()) -> Iterator[Layer]:
    """Yields the layers of the file `path`, base first; `given`: the path again, or a dictionary in
    place of the file; `below`: the files whose chain of `base` led to this file.
    """
    is_file = not isinstance(given, Mapping)
    if is_file and path.resolve() in below:
        raise ConfigError(
            f"{path} is its own base: {' -> '.join(map(str, (*below, path.resolve())))}. Take base out of one."
        )
    tree = _dictionary(given) if isinstance(given, Mapping) else _tree_of(path)
    folder, base = path.parent if is_file else path, tree.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(
                f"{path}: base={base!r} must be the path of another config file, from {folder}."
            )
        yield from _layers(folder / base, folder / base, (*below, path.resolve()))
    yield Layer(folder, tree)


def _dictionary(given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        _refuse_unusable(given)
    except ValueError as error:
        raise ConfigError(f"The dictionary can't be a config: {error}") from error
    return dict(given)


def _tree_of(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder. Give the YAML file in it.")
    if not path.is_file():
        near = difflib.get_close_matches(
            path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1
        )
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"There is no config file {path}.{hint}")
    try:
        tree = read_yaml(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line} is not UTF-8 ({error.reason}). Save the file as UTF-8, or give a YAML file."
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deep to be options.") from error
    except yaml.MarkedYAMLError as error:
        place = path if error.problem_mark is None else f"{path}:{error.problem_mark.line + 1}"
        raise ConfigError(f"{place} is not YAML: {error.problem}.") from error
    # an invalid date or number, or an anchor that contains itself
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} holds a {type(tree).__name__}; it must be sections of options, such as 'model: {{path: DIR}}'."
        )
    return tree
