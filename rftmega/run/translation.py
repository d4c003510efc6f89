"""Translates the options of a script for TRL, or a command line for verl, by the tables of the
documentation (from_other_systems.md).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from rftmega import config as configuration
from rftmega.config.tree import options, unions
from rftmega.config.unknown_options import Named, row_of, rows, spelt
from rftmega.core.errors import ConfigError, shown
from rftmega.run.foreign_source import Source

MODEL = "org/name"  # stands for the model if none is known
SECRET = re.compile(r"token$|key$|secret|password", re.IGNORECASE)
INSTEAD = {"num_train_epochs": "max_steps", "trainer.total_epochs": "trainer.total_training_steps"}
"""Options that have no effect if another one is given."""

Options = Mapping[str, Any]


class Translated(NamedTuple):
    """Translated is the result of a translation. `options`: name -> value of this project's
    options; `left`: a line about each option that was not translated.
    """

    options: dict[str, Any]
    left: list[str]


def translated(system: str, source: Source, processes: int = 0) -> Translated:
    """Translates the options of a program for `system` (TRL or verl). Defaults of `system` that
    differ from this project's are translated as well. `processes`: number of processes of the
    program, 0: unknown.

    An option is left out if `configuration.load` does not accept its translation.
    """
    given = {_bare(name): value for name, value in source.options.items() if value is not None}
    computed = COMPUTED[system](given, processes)
    found, left = _found(system, given, computed)
    left += [
        f"{name}={_told(name, text)} is known only when the program runs. {_here(system, name)}"
        for name, text in source.unreadable.items()
    ]
    accepted: dict[str, Any] = {name: value for name, (value, _, _) in found.items()}
    if _problem(accepted):
        accepted = {}
        for option in sorted(found, key=lambda name: (name.rpartition(".")[2] != "type", name)):
            value, said, is_given = found[option]
            if not (problem := _problem({**accepted, option: value})):
                accepted[option] = value
            elif is_given:
                left.append(f"{said}: {problem}")
    if "model.path" not in accepted:
        left.insert(0, f"the model is not known: put it in the place of model.path={MODEL}.")
    return Translated({"model.path": MODEL, **accepted}, left)


def _found(
    system: str, given: Options, computed: Options
) -> tuple[dict[str, tuple[Any, str, bool]], list[str]]:
    """Returns our option -> (value, the other framework's option, whether it was given), and a line
    for each option without a translation. `computed`: our options whose values are computed from
    several options of the other framework.
    """
    found: dict[str, tuple[Any, str, bool]] = {}
    left = []
    read = [(name, value, row_of(system, name, value)) for name, value in given.items()]
    read.sort(key=lambda each: -len(_pairs(each[2], each[1])))  # the one for both bounds first
    defaults = [(name, own, row_of(system, name, own)) for name, own in _defaults(system, given)]
    for name, value, row in [*defaults, *read]:
        is_given, pairs = name in given, _pairs(row, value)
        said = f"{name}={_told(name, value)}" + ("" if is_given else " (the default there)")
        for option, own in pairs:
            found[option] = own, said, is_given
        if not pairs and not (row and _options_of(row) & computed.keys()):
            left.append(f"{said}: {_reason(row, value)}")
    found |= {option: (value, option, True) for option, value in computed.items()}
    return found, left


def _reason(row: Named | None, value: Any) -> str:
    """Returns the text of the tables about an option that is not translated."""
    if row is None:
        return "no row of the tables has it"
    other = row.value and row.value != spelt(value)
    return f"the tables have {row.value} only ({row.here})" if other else row.here


def _pairs(row: Named | None, value: Any) -> list[tuple[str, Any]]:
    """Returns our options and their values for an option of another framework with this value; an
    empty list if it cannot be translated.
    """
    if row is None or (row.value and row.value != spelt(value)):
        return []
    if not row.value and any(own for _, own in row.options) and value is not True:
        return []
    pairs = []
    for option, own in row.options:
        pairs += _flat(option, yaml.safe_load(own) if own else 0 if value == -1 else value)
    return pairs


def _flat(option: str, value: Any) -> list[tuple[str, Any]]:
    """Returns (option, value) pairs: for a union, its type or the options of a dictionary; for any
    other option, the option itself.
    """
    if option not in unions():
        return [(option, value)]
    if isinstance(value, dict):
        return [(f"{option}.{leaf}", own) for leaf, own in value.items()]
    return [(f"{option}.type", value)]


def _defaults(system: str, given: Options) -> Iterator[tuple[str, Any]]:
    """Yields (option, default) for options of `system` whose default differs from ours. The program
    must not set the option itself, but another option of the same section.
    """
    sections = {"", *(name.rpartition(".")[0] for name in given)}
    names = {option for name in given for option in _options_of(row_of(system, name, given[name]))}
    for row in rows():
        about = row.system == system and row.default and row.name not in given
        here = row.name.rpartition(".")[0] in sections and INSTEAD.get(row.name) not in given
        if about and here and not names & _options_of(row):
            yield row.name, yaml.safe_load(row.default)


def _options_of(row: Named | None) -> set[str]:
    """Returns the options of ours that a row names, whether or not it is a translation."""
    words = re.findall(r"[a-z_]+(?:\.[a-z_]+)+", row.here) if row else []
    return {word for word in words if word in options()} | (
        {name for name, _ in row.options} if row else set()
    )


def _problem(chosen: Options) -> str:
    """Returns why our options cannot be loaded; "" if they can."""
    try:
        configuration.load({"model.path": MODEL, **chosen})
    except ConfigError as error:
        return str(error).splitlines()[-1].strip(" -")
    return ""


def _here(system: str, name: str) -> str:
    row = row_of(system, _bare(name), None)
    return f"Here: {row.here}" if row else ""


def _bare(name: str) -> str:
    return name.lstrip("+~").removeprefix("actor_rollout_ref.")


def _told(name: str, value: Any) -> str:
    return (
        "..." if isinstance(value, str) and SECRET.search(name) else shown(spelt(value)).strip("'")
    )


def _of_trl(given: Options, processes: int) -> dict[str, Any]:
    """Returns those of our options that are computed from several of TRL's. TRL gives batch sizes
    in completions per device, and counts optimizer steps where this project counts rollouts. A
    number that is not whole is left out.
    """
    accumulated = _number(given, "gradient_accumulation_steps", 1)
    micro_batch = _number(given, "per_device_train_batch_size", 8) * processes
    completions = _number(given, "generation_batch_size", 0)
    per_generation = _number(given, "steps_per_generation", accumulated)
    if completions and micro_batch:
        per_generation = completions / micro_batch
    known = not completions or micro_batch > 0
    completions = completions or micro_batch * per_generation
    updates = per_generation / accumulated if known and accumulated else 0.0
    steps = updates * _number(given, "num_iterations", 1)
    found = {
        "trainer.prompts_per_step": completions / (_number(given, "num_generations", 8) or 1),
        "algorithm.updates_per_epoch": updates,
    }
    for name, option in RUNNING.items():
        if steps and _number(given, name, 0) > 0:
            found[option] = _number(given, name, 0) / steps
    if _number(given, "warmup_steps", 0) >= 1:
        found["optimizer.warmup_steps"] = _number(given, "warmup_steps", 0)
    largest = _number(given, "epsilon_high", 0)
    if given.get("loss_type") != "cispo" or not largest:
        return _whole(found)
    loss = {"type": "cispo", "low": 1.0, "high": largest - 1}  # no lower bound; the ratio's own cap
    return _whole(found) | {f"algorithm.policy_loss.{name}": own for name, own in loss.items()}


RUNNING = {  # options of TRL in optimizer steps -> ours in rollouts
    "max_steps": "trainer.steps",
    "eval_steps": "trainer.eval_every",
    "save_steps": "checkpoint.every",
}


def _of_verl(given: Options, _processes: int) -> dict[str, Any]:
    """Returns those of our options that are computed from several of verl's. verl gives the size of
    mini-batches instead of their number, and counts rollouts where this project counts optimizer
    steps.
    """
    prompts = _number(given, "data.train_batch_size", 1024)
    mini_batch = _number(given, "actor.ppo_mini_batch_size", 256)
    updates = prompts / mini_batch if mini_batch else 0.0
    found = {"algorithm.updates_per_epoch": updates}
    warmup = _number(given, "actor.optim.lr_warmup_steps", 0)
    if warmup > 0:
        found["optimizer.warmup_steps"] = warmup * updates * _number(given, "actor.ppo_epochs", 1)
    kl: dict[str, Any] = {}
    if given.get("actor.use_kl_loss") is True:
        kl = {"algorithm.kl.coef": _number(given, "actor.kl_loss_coef", 0.001)}
    elif given.get("algorithm.use_kl_in_reward") is True:
        coef = _number(given, "algorithm.kl_ctrl.kl_coef", 0.001)
        kl = {"algorithm.kl.coef": coef, "algorithm.kl.placement": "reward"}
    return _whole(found) | kl


def _number(given: Options, name: str, default: float) -> float:
    value = given.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _whole(found: Mapping[str, float]) -> dict[str, Any]:
    """Returns the values that are whole numbers above 0."""
    return {name: int(value) for name, value in found.items() if value > 0 and value == int(value)}


COMPUTED: dict[str, Callable[[Options, int], dict[str, Any]]] = {"TRL": _of_trl, "verl": _of_verl}


def as_yaml(found: Translated, heading: str) -> str:
    """Returns the translated options as the text of a YAML file, which lists as comments what was
    not translated. `heading`: text of the comment at the top.
    """
    order = list(options())
    tree: dict[str, Any] = {}
    for name in sorted(found.options, key=lambda name: order.index(name) if name in order else -1):
        *sections, leaf = name.split(".")
        section = tree
        for each in sections:
            section = section.setdefault(each, {})
        section[leaf] = found.options[name]
    lines = [*heading.splitlines(), *(["Not translated:"] if found.left else [])]
    comments = [f"# {line}" for line in [*lines, *(f"  {line}" for line in found.left)]]
    return "\n".join([*comments, "", yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)])
