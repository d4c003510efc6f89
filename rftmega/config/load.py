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

DEEPEST = 8  # sections within sections
JUDGES = ("math", "multiple_choice", "code")  # parts of the reward that find out whether an answer is right, as exact_match does
MEANT = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[int]: "a list of whole numbers, as [1,2]",
    dict[str, float]: "names and numbers, as {a: 1}",
    dict[str, str]: "names and text, as {a: b}",
    dict[str, dict[str, float]]: "names of names and numbers, as {a: {b: 1}}",
}


def options(schema: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, type) of all options, in the order of the schema."""
    for f in fields(schema):
        nested = f.default_factory if is_dataclass(f.default_factory) else None
        if nested:
            yield from options(nested, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f.type


def sections() -> set[str]:
    """Dotted names that hold options."""
    return {name[:at] for name, _ in options() for at in range(len(name)) if name[at] == "."}


def parse_override(text: str) -> tuple[str, Any]:
    """ "a.b=value" -> ("a.b", value), the value read as YAML where it is some. Raises ConfigError without "="."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals:
        raise ConfigError(f"{text!r} is not an override. Write option=value, e.g. parallel.tensor=2.")
    if not value or dict(options()).get(name) is str:  # a regular expression may look like YAML
        return name, value
    try:
        parsed = read_yaml(value)
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"{text!r}: {error.problem}.") from error
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError):
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
    if "reward.exact_match" not in given and _judged_otherwise(config):
        config.reward.exact_match = 0.0
    problems += [f"{name} must be given." for name in known if OmegaConf.is_missing(*_parent(config, name))]
    if problems:
        raise ConfigError.listing(str(path), problems)
    run = OmegaConf.to_object(config)
    assert isinstance(run, RunConfig)
    return run


def _judged_otherwise(config: Any) -> bool:
    """Whether another part finds out if answers are right, so that exact_match would count the same once more."""
    read = config.algorithm.task == "rl" and not config.reward.recipe and not config.reward.majority
    return read and any(OmegaConf.select(config, f"reward.{part}") for part in JUDGES)


def recipe(name: str) -> dict[str, Any]:
    """Dotted options that a recipe sets; none for "". Raises ConfigError for a name that there is not."""
    files = {path.stem: path for path in Path(__file__).with_name("recipes").glob("*.yaml")}
    if not name:
        return {}
    if name not in files:
        raise ConfigError(f"algorithm.recipe={name} is unknown. Choose one of: {', '.join(sorted(files))}.")
    return flatten(_read_yaml(files[name]))


class StrictLoader(yaml.SafeLoader):
    """StrictLoader reads YAML without a key that a mapping names twice, of which the last would count without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Raises a YAML error that names the line of the second."""
        seen: list[Any] = []
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is there twice", key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep=deep)


def read_yaml(text: str) -> Any:
    """The one document of a text. Raises a YAML error, and what a date or number that there is not raises."""
    loader = StrictLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; an option that is a dictionary itself stays whole. A section without options is none.

    Raises ConfigError for sections that are within one another for ever (an anchor that holds itself).
    """
    flat: dict[str, Any] = {}
    known = dict(options())
    if prefix.count(".") > DEEPEST:
        raise ConfigError(f"{prefix[:40]}...: sections within sections, {DEEPEST} deep. Does an anchor (&) hold itself (*)?")
    for key, value in tree.items():
        if value is None and f"{prefix}{key}" in sections():
            continue
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
    if path.is_dir():
        raise ConfigError(f"{path} is a folder. Give the YAML file in it.")
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"There is no config file {path}.{hint}")
    try:
        tree = read_yaml(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line} is not UTF-8 ({error.reason}). Save the file as UTF-8, or give a YAML file.") from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deep to be options.") from error
    except yaml.MarkedYAMLError as error:
        place = path if error.problem_mark is None else f"{path}:{error.problem_mark.line + 1}"
        raise ConfigError(f"{place} is not YAML: {error.problem}.") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date or a number that there is not
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} holds a {type(tree).__name__}; it must be sections of options, such as 'model: {{path: DIR}}'."
        )
    return tree


def _unfit(name: str, value: Any, error: OmegaConfBaseException) -> str:
    if name in SECRET:
        return f"{name} must be text."
    kind = dict(options()).get(name) or dict(options()).get(name.rpartition(".")[0])
    meant = MEANT[kind] if kind in MEANT else f"something else ({str(error).splitlines()[0]})"
    return f"{name}={value!r} must be {meant}."


def _unknown(name: str, known: list[str]) -> str:
    section, _, leaf = name.rpartition(".")
    if name in sections():
        inside = [k for k in known if k.startswith(f"{name}.")]
        return f"{name} is a section, not an option. Give options of it, as {inside[0]}."
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
