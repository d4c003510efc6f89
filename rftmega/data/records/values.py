"""Access to values of records by their keys."""

from typing import Any

Record = dict[str, Any]


def value_at(record: Record, key: str, otherwise: Any = None) -> Any:
    """Returns a record's value under a key; "a.b" is also the key b of the object under a."""
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
    """Returns a record with the value replaced where `value_at` finds it, or added under a new
    key.
    """
    outer, dot, inner = key.partition(".")
    within = record.get(outer)
    if dot and key not in record and isinstance(within, dict):
        return {**record, outer: with_value(within, inner, value)}
    return {**record, key: value}


def listed(record: Record, key: str) -> list[Any]:
    """Returns a record's value under a key as a list: of one value, several, or none."""
    given = value_at(record, key)
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
