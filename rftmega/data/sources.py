"""Accepted values of media columns: paths within one folder, URLs, bytes, or base64."""

import base64
import binascii
from collections.abc import Iterable, Sequence
from pathlib import Path

from rftmega.config import DataConfig, split_source
from rftmega.core.errors import DataError, shown
from rftmega.data.fetched_files import Fetched
from rftmega.data.media.files import with_article
from rftmega.data.records import Record, listed, value_at, with_value

ADDRESS = "://"  # substring of URLs


def folder_of(source: str | Path, config: DataConfig) -> Path:
    """Returns the folder that paths of media are relative to: data.media_folder, or by default the
    folder of the data file `source`.
    """
    path, _ = split_source(source)
    beside = path if path.is_dir() else path.parent
    return Path(config.media_folder or beside).resolve()


def path_in(folder: Path, value: str, noun: str, fetched: Fetched) -> str:
    """Returns the absolute path of the file `value` in `folder`, or, if `value` is a URL, of the
    file that `fetched` downloads. `noun`: type of the file, for error messages.

    Raises DataError for a URL that is not allowed, and for a path outside the folder.
    """
    if ADDRESS in value:
        return str(fetched.file(value))
    try:
        path = (folder / value).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte, circular links
        raise DataError(f"{shown(value)} can't be {with_article(noun)}'s path: {error}.") from error
    if not path.is_relative_to(folder):
        raise DataError(
            f"{value} leads out of {folder}, where the {noun}s are. Set data.media_folder to a folder that has all of them."
        )
    return str(path)


def decoded(text: str, kind: str, example: str) -> bytes:
    """Returns the bytes of `text`, a base64 data URL data:`kind`/...;base64,... `kind`: "image" or
    another media type; `example`: noun for such a file, for error messages.

    Raises DataError for any other text.
    """
    head, _, content = text.partition(",")
    if not head.startswith(f"data:{kind}/") or not head.endswith(";base64"):
        raise DataError(f"{shown(text)} is no {example}: data:{kind}/...;base64,... is.")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise DataError(f"{shown(text)} is no base64: {error}.") from None


def addresses(records: Iterable[Record], keys: Sequence[str]) -> list[str]:
    """Returns all URLs that records have under the given keys."""
    values = [each for record in records for key in keys for each in listed(record, key)]
    return [each for each in values if isinstance(each, str) and ADDRESS in each]


def without_contents(record: Record, config: DataConfig) -> Record:
    """Returns a copy of a record without media contents: images and waveforms that are given as
    bytes or base64 are replaced by ""; paths stay.
    """
    for key in (config.images_key, config.audio_key):
        if value_at(record, key) is None:
            continue
        names = []
        for value in listed(record, key):
            path = value.get("path") if isinstance(value, dict) else value
            inside = not isinstance(path, str) or path.startswith("data:")
            names.append("" if inside else path)
        record = with_value(record, key, names)
    return record


def refuse_media(record: Record, config: DataConfig) -> None:
    """Raises DataError if a record of preferences names images, videos or waveforms."""
    for option in ("images_key", "videos_key", "audio_key"):
        if value_at(record, key := getattr(config, option)):
            raise DataError(
                f'"{key}" names images, videos or waveforms, and preferences are text alone so far. Leave the '
                f"record out, or set data.{option} to a key that no record has."
            )
