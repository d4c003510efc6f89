"""Configs with other values, as `load` makes them, without reading and checking all of it again."""

from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from rftmega.config import RunConfig
from rftmega.config.load import JUDGES, parse_override
from rftmega.config.tree import AS_THE_POLICY, options, value_of

# their values change others
LEADING = {"algorithm.recipe", "plugins", "reward.functions", *(f"reward.{x}" for x in JUDGES)}


def leads(override: str) -> bool:
    """Whether other options follow this one, so that it takes a `load`."""
    name = override.partition("=")[0]
    return name in LEADING or name not in options() or name.endswith(".type")


def overridden(config: RunConfig, override: str) -> RunConfig:
    """Returns a copy with another value of an option that no others follow but the critic's."""
    assert not leads(override)
    name, value = parse_override(override)
    value = TypeAdapter(options()[name]).validate_python(value)
    critics = f"critic.{name}"
    follows = name.startswith(AS_THE_POLICY) and value_of(config, name) == value_of(config, critics)
    config = with_value(config, name, value)
    return with_value(config, critics, value) if follows else config


def with_value(config: RunConfig, name: str, value: Any) -> RunConfig:
    """Returns a copy in which this one option has another value."""
    changed: RunConfig = _with(config, name.split("."), value)
    return changed


def _with(node: Any, names: list[str], value: Any) -> Any:
    first, *rest = names
    return replace(node, **{first: _with(getattr(node, first), rest, value) if rest else value})
