"""YAML file + dotted overrides -> RunConfig. Every problem of every option is collected before one error is raised."""

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rftmega.config.schema import RunConfig
from rftmega.config.secrets import SECRET
from rftmega.config.validate_ranges import AS_THE_POLICY
from rftmega.errors import ConfigError


def options(schema: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, type) of all options, in the order of the schema."""
    for f in fields(schema):
        nested = f.default_factory if is_dataclass(f.default_factory) else None
        if nested:
            yield from options(nested, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f.type


def parse_override(text: str) -> tuple[str, Any]:
    """ "a.b=value" -> ("a.b", value), the value read as YAML where it is some. Raises ConfigError without "="."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals:
        raise ConfigError(f"{text!r} is not an override. Write option=value, e.g. parallel.tensor=2.")
    if not value or dict(options()).get(name) is str:  # a regular expression may look like YAML
        return name, value
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        return name, value
    if isinstance(parsed, str):
        with contextlib.suppress(ValueError):
            parsed = float(parsed)  # YAML 1.1 reads 1e-6 as a string; numbers are numbers here
    return name, parsed


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads `path` and the file that it names as its `base`, applies `overrides` on top, and fills in the defaults.

    What is given for the policy's layout and optimizer holds for the critic too, unless it is given for that.
    Raises ConfigError with one line for each unknown option (and the nearest that exists), wrong type or missing value.
    """
    given = _with_base(Path(path))
    given |= dict(parse_override(text) for text in overrides)
    given = recipe(str(given.get("algorithm.recipe") or "")) | given
    config = OmegaConf.structured(RunConfig)
    known = [name for name, _ in options()]
    tables = [name for name, kind in options() if get_origin(kind) is dict]  # whose keys are the user's
    problems = []
    for name, value in given.items():
        if name not in known and name.rpartition(".")[0] not in tables:
            problems.append(_unknown(name, known))
            continue
        try:
            OmegaConf.update(config, name, value)
        except OmegaConfBaseException as error:
            problems.append(_unfit(name, value, error))
    for name in known:
        if name.startswith(AS_THE_POLICY) and f"critic.{name}" not in given:
            OmegaConf.update(config, f"critic.{name}", OmegaConf.select(config, name))
    problems += [f"{name} must be given." for name in known if OmegaConf.is_missing(*_parent(config, name))]
    if problems:
        raise ConfigError.listing(str(path), problems)
    run = OmegaConf.to_object(config)
    assert isinstance(run, RunConfig)
    return run


def recipe(name: str) -> dict[str, Any]:
    """Dotted options that a recipe sets; none for "". Raises ConfigError for a name that there is not."""
    files = {path.stem: path for path in Path(__file__).with_name("recipes").glob("*.yaml")}
    if not name:
        return {}
    if name not in files:
        raise ConfigError(f"algorithm.recipe={name} is unknown. Choose one of: {', '.join(sorted(files))}.")
    return flatten(_read_yaml(files[name]))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; an option that is a dictionary itself stays whole."""
    flat: dict[str, Any] = {}
    known = dict(options())
    for key, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in known:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _with_base(path: Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Dotted options of a file, over those of its base, a path from its own folder. `below`: the files that led here."""
    if path.resolve() in below:
        raise ConfigError(f"{path} is its own base: {' -> '.join(map(str, (*below, path.resolve())))}. Take base out of one.")
    tree = _read_yaml(path)
    base = tree.pop("base", None)
    if base is None:
        return flatten(tree)
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base={base!r} must be the path of another config file, from {path.parent}.")
    return _with_base(path.parent / base, (*below, path.resolve())) | flatten(tree)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"There is no config file {path}.{hint}")
    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} holds a {type(tree).__name__}; it must be sections of options, such as 'model: {{path: DIR}}'."
        )
    return tree


def _unfit(name: str, value: Any, error: OmegaConfBaseException) -> str:
    return f"{name}: must be text." if name in SECRET else f"{name}={value!r}: {str(error).splitlines()[0]}"


def _unknown(name: str, known: list[str]) -> str:
    section, _, leaf = name.rpartition(".")
    same_leaf = [k for k in known if k.endswith(f".{leaf}")]
    if same_leaf and not section:
        near = same_leaf
    else:
        near = difflib.get_close_matches(name, same_leaf or known, n=1, cutoff=0.0 if same_leaf else 0.6)
    hint = f" Did you mean {' or '.join(near)}?" if near else " `train_rl.py --help` lists them all."
    return f"{name} is not an option.{hint}"


def _parent(config: Any, name: str) -> tuple[Any, str]:
    section, _, leaf = name.rpartition(".")
    return OmegaConf.select(config, section), leaf
