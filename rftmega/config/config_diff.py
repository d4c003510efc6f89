"""Differences between the options of a resumed run and of the run that saved its checkpoint."""

import json
from typing import Any

from rftmega.config.load import flatten
from rftmega.config.options.secrecy import SecretText
from rftmega.config.secrets import NOT_STORED, hint_of, stored
from rftmega.config.tree import AS_THE_POLICY

NOTHING = "(nothing)"


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns one line "name: old -> new" per option that differs between two trees of options,
    `before` and `now`.

    Either tree may have been stored as JSON. An option that only one tree has is shown as (nothing)
    for the other tree. A change of a policy option is not repeated for the critic's option that
    defaults to it.
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
    """Returns dotted name -> value as text for all options of `tree`, nested dictionaries, without
    secrets that an older version may have stored.
    """
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
    """Returns the policy option that is the default of the critic option `name`; "" if `name` is
    not such an option.
    """
    own = name.removeprefix("critic.")
    return own if own != name and own.startswith(AS_THE_POLICY) else ""
