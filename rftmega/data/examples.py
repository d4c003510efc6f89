"""Conversion of records to examples. Checks every record before the first example is used."""

import hashlib
import json
import logging
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from rftmega.core.errors import DataError
from rftmega.data.chat.unrendered import Report
from rftmega.data.records import Record, records, value_at
from rftmega.data.records.epochs import Examples, identity_of

log = logging.getLogger(__name__)
T = TypeVar("T")
MISSING = object()
CHATS = ("messages", "conversations", "conversation")  # columns of published chat datasets


class TooLong(DataError):
    """Raised for an example over a length limit. With data.too_long=drop, such examples are
    skipped.
    """


def load_examples(
    source: str | Path,
    parse: Callable[[Record, int], T],
    *,
    too_long: str,
    noun: str,
    places: list[str] | None = None,
    report: Report | None = None,
    most: int | None = None,
) -> Examples[T]:
    """Returns the examples that `parse`(record, number of examples so far) makes of the records in
    `source`, a data file or folder.

    `noun`: plural name of the examples, for messages; `most`: maximum number of records to read,
    None: all. The location of each example (such as "file:line") is appended to `places`. Logs the
    unrendered message parts that `parse` adds to `report`.

    Raises DataError that lists all invalid records and all records for which `parse` raised
    DataError. If `too_long` is "drop", records for which `parse` raised TooLong are skipped and
    their number is logged.
    """
    examples: list[T] = []
    identities: list[int] = []
    problems: list[str] = []
    dropped = 0
    for where, record in islice(records(source), most):
        try:
            if isinstance(record, DataError):
                raise record
            if report is not None:
                report.pending.clear()
            examples.append(parse(record, len(examples)))
            identities.append(identity_of(_as_text(record)))
            if report is not None:
                report.settle(where)
            if places is not None:
                places.append(where)
        except TooLong as error:
            if too_long == "drop":
                dropped += 1
            else:
                problems.append(f"{where}: {error}")
        except DataError as error:
            problems.append(f"{where}: {error}")
    if problems:
        raise DataError.first_of(problems)
    if dropped:
        log.warning(
            "%s: dropped %d of %d %s, which are too long",
            source,
            dropped,
            dropped + len(examples),
            noun,
        )
    if report is not None:
        report.log(source)
    if not examples:
        raise DataError(f"{source} holds no usable {noun.removesuffix('s')}.")
    return Examples(examples, identities)


def _as_text(record: Record) -> str:
    """Returns a text that identifies a record by its content, independent of the record's location
    and the file format. Media content is represented by its checksum.
    """

    def told(value: Any) -> Any:
        if isinstance(value, bytes):
            return hashlib.sha256(value).hexdigest()
        return repr(value)

    ordered = dict(sorted(record.items(), key=lambda item: str(item[0])))
    try:
        return json.dumps(ordered, default=told)
    except (TypeError, ValueError, RecursionError):  # a user's function may return anything
        return repr(ordered)


def required(record: Record, key: str, option: str) -> Any:
    """Returns the record's value under `key`. `option`: the option that sets `key`, for error
    messages.

    Raises DataError if the record has no such key.
    """
    found = value_at(record, key, MISSING)
    if found is MISSING:
        near = [name for name in CHATS if name in record and option == "data.prompt_key"]
        hint = f" Set {option}={near[0]}." if near else ""
        raise DataError(
            f'no "{key}" among the keys {sorted(record)} (the key is set by {option}).{hint}'
        )
    return found
