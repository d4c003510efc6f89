"""Loads a run's config: YAML file + dotted overrides -> RunConfig.

The problems of all options are collected and raised as a single error.
"""

import contextlib
import copy
import difflib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationValidationError, OmegaConfBaseException

from rftmega.config.files import UNUSABLE, Given, layers_of, read_yaml
from rftmega.config.paths import is_recipe_path, misplaced
from rftmega.config.plugins import plugin_parts
from rftmega.config.renamed import RENAMED_TYPES, renamed
from rftmega.config.schema import RewardConfig, RunConfig
from rftmega.config.secrets import holds_secrets, interpolated, shown, without_credentials
from rftmega.config.task_libraries import GAMES, task_source
from rftmega.config.tree import (
    AS_THE_POLICY,
    Plugins,
    built,
    default_type,
    hints,
    listed,
    merged_schema,
    options,
    sections,
    unions,
)
from rftmega.config.unknown_options import unknown
from rftmega.config.user_code.functions import name_of
from rftmega.core.errors import ConfigError

DICTIONARY = "This config"  # name in errors for options that are in no file
READ_FIRST = ("plugins", "algorithm.recipe")  # needed to interpret the other options
MOST_BITS = 1023  # maximum for an integer that a float can hold
MISSING = "???"  # OmegaConf's marker of a missing value
DEEPEST = 8  # maximum nesting of sections
# reward components that judge correctness, as exact_match does
JUDGES = ("math", "multiple_choice", "code", "task_library")
REWARDS = ("recipe", "functions", "custom", "model", "cost", "majority")  # beside the components
MEANT = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[str]: "a list of text, as [a,b]",
    list[float]: "a list of numbers, as [1,0.5]",
    list[int]: "a list of whole numbers, as [1,2]",
    dict[str, float]: "names and numbers, as {a: 1}",
    dict[str, str]: "names and text, as {a: b}",
    dict[str, Any]: "names and values, as {a: false}",
    dict[str, dict[str, float]]: "names of names and numbers, as {a: {b: 1}}",
}


def parse_override(text: str, plugins: Plugins = ()) -> tuple[str, Any]:
    """Splits "a.b=value" into ("a.b", value), with the value parsed as YAML if possible; as text if
    the option is text. `plugins`: the classes of user-defined components.

    Raises ConfigError if there is no "=".
    """
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals:
        raise ConfigError(
            f"{text!r} is not an override. Write option=value, e.g. parallel.tensor=2."
        )
    told = name if holds_secrets(name) else repr(text)
    if UNUSABLE.search(text):
        raise ConfigError(f"{told} contains bytes that are no characters (it is not UTF-8).")
    if not value or options(plugins).get(name) is str:  # a regular expression may look like YAML
        return name, value
    try:
        parsed = read_yaml(value)
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"{told}: {error.problem}.") from error
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError):
        return name, value
    if isinstance(parsed, str):
        with contextlib.suppress(ValueError):
            parsed = float(parsed)  # YAML 1.1 reads 1e-6 as a string; numbers are numbers here
    return name, parsed


def load(config: Given, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads `config`, a file or the equivalent dictionary, and the file that it names as its
    `base`, applies `overrides` on top, and fills in the defaults. Relative paths are relative to
    the working directory, not to the file that contains them (`config.paths`).

    The policy's layout and optimizer options are also the critic's defaults. If a file or override
    selects another type of a component than a lower layer, the lower layer's options of that
    component are dropped. Raises ConfigError with one line for each unknown option (and the closest
    existing one), wrong type or missing value.
    """
    origin = DICTIONARY if isinstance(config, Mapping) else str(config)
    files, here = _layers(config), dict(parse_override(text) for text in overrides)
    elsewhere = _misplaced(config, here)
    if early := [elsewhere[name] for name in READ_FIRST if name in elsewhere]:
        raise ConfigError.listing(origin, early)
    plugins = _plugins_of([*files, here])
    said = dict(parse_override(text, plugins) for text in overrides)
    layers = [_flat_parts(layer, plugins) for layer in (*files, said)]
    named = next(
        (layer["algorithm.recipe"] for layer in reversed(layers) if "algorithm.recipe" in layer), ""
    )
    layers = [_flat_parts(layer, plugins) for layer in recipe(str(named or ""))] + layers
    given = _merged(layers, plugins)
    chosen, given, problems = _chosen_parts(given, plugins)
    filled = copy.deepcopy(_defaults(tuple(chosen.items()), plugins))
    known = list(options(plugins))
    refused = {name: _refused(name, value, chosen, plugins) for name, value in given.items()}
    taken = {name: value for name, value in given.items() if not refused[name]}
    refused |= {name: _put(filled, name, value, plugins) for name, value in taken.items()}
    taken = {name: value for name, value in taken.items() if not refused[name]}
    refused |= {name: _unresolved(filled, name, value, plugins) for name, value in taken.items()}
    problems += [*filter(None, refused.values()), *elsewhere.values()]
    active = [name for name in known if not _union_of(name, chosen)]
    problems += [f"{name} must be given." for name in active if _is_missing(filled, name)]
    if problems:
        raise ConfigError.listing(origin, list(map(without_credentials, problems)))
    _fill_in(filled, given, known)
    tree: Any = interpolated(
        OmegaConf.to_container(filled), OmegaConf.to_container(filled, resolve=True)
    )
    run = built(RunConfig, tree, plugins)
    assert isinstance(run, RunConfig)
    return run


@lru_cache(32)
def _defaults(chosen: tuple[tuple[str, str], ...], plugins: Plugins) -> Any:
    """Returns the config with the defaults of all options; `chosen`: (union name, type of the
    chosen component) of each union. Callers copy the cached result, which is five times as fast as
    building it again.
    """
    return OmegaConf.structured(merged_schema(dict(chosen), plugins))


def _put(config: Any, name: str, value: Any, plugins: Plugins) -> str:
    """Sets the option `name` in `config`. Returns "", or the reason if the value is invalid."""
    if _too_large(value):
        return f"{name} holds a whole number of more than 300 digits. Give a smaller one."
    if value == MISSING:
        return f"{name}={MISSING} stands for a value that is to be given. Give it, or leave the option out."
    try:
        OmegaConf.update(config, name, value)
    except OmegaConfBaseException as error:
        return _unfit(name, value, error, plugins)
    return ""


def _unresolved(config: Any, name: str, value: Any, plugins: Plugins) -> str:
    """Returns the reason why references (${...}) in the value of `name` cannot be resolved; "" if
    all can be resolved.
    """
    try:
        found = OmegaConf.select(config, name)
        if OmegaConf.is_config(found):
            OmegaConf.to_container(found, resolve=True)
    except InterpolationValidationError as error:
        return _unfit(name, value, error, plugins)
    except OmegaConfBaseException as error:
        return f"{shown(name, value)} refers to what is not there ({str(error).splitlines()[0]})."
    return ""


def _too_large(value: Any) -> bool:
    """Returns whether a value is, or contains in lists or dictionaries, an integer larger than any
    float.
    """
    if isinstance(value, Mapping):
        return any(map(_too_large, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple | set):
        return any(map(_too_large, value))
    return isinstance(value, int) and value.bit_length() > MOST_BITS


def _is_missing(config: Any, name: str) -> bool:
    section, _, leaf = name.rpartition(".")
    return OmegaConf.is_missing(OmegaConf.select(config, section), leaf)


def _fill_in(config: Any, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Sets the options of `config` whose defaults depend on other options, except options in
    `given`, which the user set. `known`: the names of all options.
    """
    for name in known:
        if name.startswith(AS_THE_POLICY) and f"critic.{name}" not in given:
            OmegaConf.update(config, f"critic.{name}", OmegaConf.select(config, name))
    if not _names_a_reward(config, given):
        _let_libraries_score(config, given)
    if "reward.exact_match" not in given and _judged_otherwise(config):
        config.reward.exact_match = 0.0
    if config.reward.functions and not _compares_with_labels(config):
        _judge_by_functions(config, given)


def _layers(config: Given) -> list[dict[str, Any]]:
    """Returns the options of each file of a config as dotted name -> value; the file named as
    `base` comes before the file that names it.
    """
    return [flatten(layer.tree) for layer in layers_of(config)]


def _misplaced(config: Given, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Returns option -> error message for each path that does not exist in the working directory
    but does exist relative to the YAML file that sets the option or, for overrides, to the config
    file.
    """
    found: dict[str, str] = {}
    *below, last = layers_of(config)
    for layer in (*below, last):
        given = flatten(layer.tree)
        found = {name: reason for name, reason in found.items() if name not in given}
        found |= misplaced(given, layer.folder)
    found = {name: reason for name, reason in found.items() if name not in overrides}
    return found | misplaced(overrides, last.folder)


def plugins_of(path: str | Path, overrides: Sequence[str] = ()) -> Plugins:
    """Returns the classes of the user-defined components in the files that the option `plugins`
    names, in the config file `path` or in `overrides`.

    Raises ConfigError as `load` does.
    """
    return _plugins_of([*_layers(path), dict(parse_override(text) for text in overrides)])


def _chosen_parts(
    given: dict[str, Any], plugins: Plugins
) -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """Returns union name -> chosen type, the options `given` (dotted name -> value) without options
    of components of unknown types, and a list of problems.
    """
    chosen, problems = {}, []
    for name, known in unions(plugins).items():
        chosen[name] = str(given.get(f"{name}.type", default_type(name)))
        if chosen[name] not in known:
            problems.append(_unknown_type(name, chosen[name], list(known)))
            given = {
                option: value
                for option, value in given.items()
                if not option.startswith(f"{name}.")
            }
            chosen[name] = default_type(name)
    return chosen, given, problems


def _refused(name: str, value: Any, chosen: Mapping[str, str], plugins: Plugins) -> str:
    """Returns the reason why the option `name` does not exist for the chosen components; "" if it
    exists. `chosen`: union name -> chosen type.
    """
    known, section = options(plugins), name.rpartition(".")[0]
    # a dictionary's keys are the user's
    if name not in known and get_origin(known.get(section)) is not dict:
        return renamed(name, value) or unknown(name, list(known), value)
    union = _union_of(name, chosen)
    leaf = name.removeprefix(f"{union}.").partition(".")[0]
    if not union or leaf == "type":
        return ""
    having = [part for part, schema in unions(plugins)[union].items() if leaf in hints(schema)]
    return (
        ""
        if chosen[union] in having
        else _of_another_part(name, value, union, chosen[union], having)
    )


def _union_of(name: str, chosen: Mapping[str, str]) -> str:
    """Returns the name of the union that contains an option, directly or within a section; "" if
    the option is not in a union. `chosen`: union name -> chosen type.
    """
    return next((union for union in chosen if name.startswith(f"{union}.")), "")


def _plugins_of(layers: Sequence[dict[str, Any]]) -> tuple[type, ...]:
    """Returns the classes of the user-defined components in the files that the option `plugins`
    names; `layers`: dotted name -> value of each file and of the overrides, of which the last one
    with `plugins` counts.

    Raises ConfigError as `plugin_parts` does.
    """
    paths: Any = next((layer["plugins"] for layer in reversed(layers) if "plugins" in layer), [])
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ConfigError(f"plugins={paths!r} must be a list of Python files, as [my_parts.py].")
    return plugin_parts(paths)


def _flat_parts(layer: dict[str, Any], plugins: Plugins) -> dict[str, Any]:
    """Returns `layer` (dotted name -> value) with components given as a dictionary split into
    dotted options; a component given as text becomes the component's `type`.
    """
    parts, found = {*unions(plugins), "reward.custom"}, dict[str, Any]()
    for name, value in layer.items():
        section = name if name in parts else name.rpartition(".")[0]
        if isinstance(value, dict) and (name in parts or section == "reward.custom"):
            found |= flatten(value, f"{name}.", plugins)
        elif name in parts and name != "reward.custom":
            found[f"{name}.type"] = value
        else:
            found[name] = value
    return found


def _merged(layers: Sequence[dict[str, Any]], plugins: Plugins) -> dict[str, Any]:
    """Returns the options of all `layers` (dotted name -> value each); a later layer overrides
    earlier ones.

    A layer that selects another type of a component discards the component's options from earlier
    layers.
    """
    found: dict[str, Any] = {}
    for layer in layers:
        for name in unions(plugins):
            before = found.get(f"{name}.type", default_type(name))
            if layer.get(f"{name}.type", before) != before:
                found = {
                    option: value
                    for option, value in found.items()
                    if not option.startswith(f"{name}.")
                }
        found |= layer
    return found


def _judged_otherwise(config: Any) -> bool:
    """Returns whether a component other than exact_match judges correctness, so that exact_match
    would count correctness twice.
    """
    read = config.algorithm.task == "rl" and not config.reward.recipe and not config.reward.majority
    parts = (*JUDGES, "functions")
    return read and any(OmegaConf.select(config, f"reward.{part}") for part in parts)


def _names_a_reward(config: Any, given: Mapping[str, Any]) -> bool:
    """Returns whether `given`, the options that the user set, choose a reward, or the run has none."""
    names = (*RewardConfig.built_in(), *REWARDS)
    return config.algorithm.task != "rl" or any(given.get(f"reward.{name}") for name in names)


def _let_libraries_score(config: Any, given: Mapping[str, Any]) -> None:
    """Sets the reward of a run with tasks of libraries (data.train=reasoning_gym://...): the
    library scores the responses to its tasks, and exact_match scores those to records of files.
    Games are scored by their environment. `given`: the options that the user set.
    """
    data = config.data
    sources = [data.train, *data.sources, data.eval, *data.evals.values()]
    parsed = [task_source(source) for source in sources if source]
    libraries = sorted({source.library for source in parsed if source is not None})
    if not libraries:
        return
    if GAMES.keys() & set(libraries):  # the environment rewards
        config.reward.exact_match = 0.0
        if "trainer.eval_accuracy" not in given:
            config.trainer.eval_accuracy = "game"
        return
    if None in parsed:
        scored = dict.fromkeys(libraries, {"task_library": 1.0})
        config.reward.recipe = {"": {"exact_match": 1.0}} | scored
        return
    config.reward.task_library = 1.0
    if "trainer.eval_accuracy" not in given and (data.eval or data.evals):
        config.trainer.eval_accuracy = "task_library"


def _compares_with_labels(config: Any) -> bool:
    """Returns whether any reward component gets the label of a prompt."""
    reward, parts = config.reward, {*JUDGES, "exact_match", "remote"}
    if config.algorithm.task != "rl" or reward.majority:
        return True
    if reward.recipe:
        return any(parts.intersection(given) for given in reward.recipe.values())
    return bool(reward.custom) or any(OmegaConf.select(reward, part) for part in parts)


def _judge_by_functions(config: Any, given: Mapping[str, Any]) -> None:
    """Sets data.label_key to empty, and uses the first reward function to measure accuracy in
    evaluation, unless `given` sets these options.
    """
    if "data.label_key" not in given:
        config.data.label_key = ""
    if "trainer.eval_accuracy" not in given and (config.data.eval or config.data.evals):
        config.trainer.eval_accuracy = name_of(config.reward.functions[0])


def recipe(name: str) -> list[dict[str, Any]]:
    """Returns the layers of a recipe as dotted options, base first; an empty list for "". Raises
    ConfigError for an unknown name.

    `name`: a recipe in rftmega/config/recipes, or the path of a YAML file.
    """
    files = {path.stem: path for path in Path(__file__).with_name("recipes").glob("*.yaml")}
    if not name:
        return []
    if is_recipe_path(name):
        return _layers(name)
    if name not in files:
        near = difflib.get_close_matches(name, files, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"algorithm.recipe={name} is unknown.{hint} Choose one of: {', '.join(sorted(files))}; or give a YAML file's path."
        )
    return _layers(files[name])


def flatten(tree: dict[str, Any], prefix: str = "", plugins: Plugins = ()) -> dict[str, Any]:
    """Flattens {"a": {"b": 1}} to {"a.b": 1}; the value of an option whose type is a dictionary is
    not flattened. `prefix` begins the dotted names.

    A section whose value is None is skipped. Raises ConfigError for endlessly nested sections (an
    anchor that contains itself).
    """
    flat: dict[str, Any] = {}
    known = options(plugins)
    if prefix.count(".") > DEEPEST:
        raise ConfigError(
            f"{prefix[:40]}...: sections within sections, {DEEPEST} deep. Does an anchor (&) hold itself (*)?"
        )
    for key, value in tree.items():
        if value is None and f"{prefix}{key}" in sections(plugins):
            continue
        if isinstance(value, dict) and f"{prefix}{key}" not in known:
            flat |= flatten(value, f"{prefix}{key}.", plugins)
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _unknown_type(name: str, value: str, known: list[str]) -> str:
    former = RENAMED_TYPES.get((f"{name}.type", value))
    if former:
        return f"{name}.type={value} is now {name}.type={former}."
    near = difflib.get_close_matches(value, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{name}.type={value} is unknown.{hint} Choose one of: {', '.join(known)}."


def _of_another_part(name: str, value: Any, union: str, chosen: str, having: list[str]) -> str:
    return f"{shown(name, value)} needs {union}.type={' or '.join(having)}, not {chosen}, which has no such option."


def _strangers(value: Any, known: list[str]) -> str:
    """Returns text that names the first key in a list of sections that is not in `known`; "" if
    there is none.
    """
    sections = [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
    for key in (str(key) for section in sections for key in section if key not in known):
        near = difflib.get_close_matches(key, known, n=1)
        return f"; {key} is none of them" + (f". Did you mean {near[0]}?" if near else "")
    return ""


def _unfit(name: str, value: Any, error: OmegaConfBaseException, plugins: Plugins) -> str:
    known = options(plugins)
    kind = known.get(name) or known.get(name.rpartition(".")[0])
    if (element := listed(kind)) is not None:
        named = list(hints(element))
        meant = f"a list of sections, each with options of: {', '.join(named)}{_strangers(value, named)}"
    else:
        meant = MEANT[kind] if kind in MEANT else f"something else ({str(error).splitlines()[0]})"
    told = name if holds_secrets(name, plugins) else f"{name}={value!r}"
    return f"{told} must be {meant}{'' if meant.endswith('?') else '.'}"
