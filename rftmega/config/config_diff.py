"""Differences between the options of a resumed run and of the run that saved its checkpoint."""

import json
from typing import Any

from rftmega.config.load import flatten
from rftmega.config.options.secrecy import SecretText
from rftmega.config.secrets import NOT_STORED, hint_of, stored
from rftmega.config.tree import AS_THE_POLICY

NOTHING = "(nothing)"


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns one line "name: old -> new" per option that differs between two trees of options.

    One of them may have gone through JSON. An option that only one side knows is (nothing) on the
    other. Values that the critic takes from the policy are not listed twice.
    """
    olds, news = _leaves(before), _leaves(now)
    pairs = {name: (olds.get(name, NOTHING), news.get(name, NOTHING)) for name in {**news, **olds}}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return [
        f"{name}: {old} -> {new}"
        for name, (old, new) in changed.items()
        if changed.get(_the_policys(name)) != (old, new)
    ]


def _leaves(tree: dict[str, Any]) -> dict[str, str]:
    """Returns the options by name, as text, without secrets that an older version may have stored."""
    known = {
        name: stored(value, hint_of(name))
        for name, value in flatten(tree).items()
        if value or hint_of(name) != SecretText
    }
    return {
        name: value if isinstance(value, str) and value else json.dumps(value)
        for name, value in known.items()
        if value != NOT_STORED
    }


def _the_policys(name: str) -> str:
    """Returns the policy's option that is the default of a critic's option; "" for all others."""
    own = name.removeprefix("critic.")
    return own if own != name and own.startswith(AS_THE_POLICY) else ""
