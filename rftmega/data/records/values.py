"""Access to values of records by their keys."""

from typing import Any

Record = dict[str, Any]


def value_at(record: Record, key: str, otherwise: Any = None) -> Any:
    """Returns a record's value under a key, or `otherwise` if there is none. "a.b" also means key b
    of the object under key a.
    """
    if key in record:
        return record[key]
    outer, dot, inner = key.partition(".")
    while dot:
        within = record.get(outer)
        if isinstance(within, dict):
            found = value_at(within, inner, otherwise)
            if found is not otherwise:
                return found
        further, dot, inner = inner.partition(".")
        outer = f"{outer}.{further}"
    return otherwise


def with_value(record: Record, key: str, value: Any) -> Record:
    """Returns a copy of a record in which `value` replaces the value that `value_at` finds under
    `key`, or is added under `key`.
    """
    outer, dot, inner = key.partition(".")
    within = record.get(outer)
    if dot and key not in record and isinstance(within, dict):
        return {**record, outer: with_value(within, inner, value)}
    return {**record, key: value}


def listed(record: Record, key: str) -> list[Any]:
    """Returns a record's value under a key as a list; empty if the record has no such value."""
    given = value_at(record, key)
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
