"""Readers of dataset files in all supported formats.

The suffix determines the format. "LIBRARY://TASKS" are tasks that a library creates
(task_libraries.py). A folder is one that `datasets` wrote with save_to_disk;
"folder#train" is one split of a DatasetDict. "file.py:rows" is a user's function that returns
records.
"""

import csv
import gzip
import itertools
import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from rftmega.config import split_source, task_source
from rftmega.config.user_code.python_files import module_of
from rftmega.core.errors import ConfigError, DataError
from rftmega.core.json_files import NotJSON, parse_json
from rftmega.data.records.task_libraries import library_records
from rftmega.data.records.values import Record

ROWS_AT_ONCE = 1024
LONGEST_LINE = 32 * 2**20  # bytes; a million tokens take a tenth of it
FILE_MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def records(source: str | Path) -> Iterator[tuple[str, Record | DataError]]:
    """Yields (location, record) for all records in `source`: a file, a folder or a user's function
    (see this module). A location is "file:line", counted from 1, or "file row N", counted from 0 as
    in `datasets`.

    Yields a DataError instead of the record for a line that is not a JSON object, so that the
    caller can list all such lines. Raises DataError for an unknown format or split, and for a file
    that is corrupt or truncated.
    """
    if (library := task_source(source)) is not None:
        yield from library_records(str(source), library)
        return
    path, split = split_source(source)
    try:
        yield from _reader(path, split)(path)
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}.") from error
    # for damaged files the readers of csv, zlib, Arrow and datasets raise undocumented exceptions
    except Exception as error:
        said = str(error) or type(error).__name__
        raise DataError(
            f"{path} can't be read: {said.rstrip('.')}. Is it whole, and what its name says?"
        ) from error


def _reader(path: Path, split: str) -> Callable[[Path], Iterator[tuple[str, Record | DataError]]]:
    if path.is_dir():
        saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
        if not saved and (files := _files_of(path, split)):
            return lambda _: itertools.chain.from_iterable(
                _reader(file, "")(file) for file in files
            )
        return lambda folder: _rows(
            path if not split else f"{path}#{split}", _dataset(folder, split)
        )
    if path.suffix == ".py":
        return lambda file: _made(file, split)
    if split:
        raise DataError(
            f"{path}#{split}: only a folder of `datasets` has splits. Leave #{split} out."
        )
    if path.suffix == ".jsonl" or path.suffixes[-2:] == [".jsonl", ".gz"]:
        return _lines
    if path.suffix in READERS:
        return lambda file: _rows(file, READERS[path.suffix](file))
    known = ", ".join((".jsonl", ".jsonl.gz", *READERS))
    raise DataError(
        f"{path} has no suffix that is known: {known}, a folder that `datasets` wrote with save_to_disk, or FILE.py:FUNCTION."
    )


def _files_of(folder: Path, split: str) -> list[Path]:
    """Returns the files of one split in a folder with the Hugging Face Hub's layout: train.jsonl,
    train/0.parquet, train-00000-of-00002.parquet. Returns an empty list if no file has a known
    format.

    Raises DataError if there are several splits and `split` names none of them.
    """
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        if file.name == "dataset_infos.json":
            continue
        if file.suffix in READERS.keys() | {".jsonl"} or file.name.endswith(".jsonl.gz"):
            above = file.parent.name if file.parent not in (folder, folder / "data") else ""
            found.setdefault(above or re.split(r"[-.]", file.name)[0], []).append(file)
    if found and split not in found and (split or len(found) > 1):
        names = " or ".join(f"{folder}#{name}" for name in found)
        chosen = repr(split) if split else "none"
        raise DataError(f"{folder} holds several splits and {chosen} was chosen. Give {names}.")
    return found[split or next(iter(found))] if found else []


def _made(path: Path, name: str) -> Iterator[tuple[str, Record | DataError]]:
    """Yields (location, record) for each record that the function `name` in the user's Python file
    `path` returns. The function is called without arguments.
    """
    place = f"{path}:{name}"
    try:
        function = getattr(module_of(str(path), "data"), name, None)
    except ConfigError as error:
        raise DataError(str(error)) from error
    if not callable(function):
        raise DataError(f"{place}: there is no function {name!r}. Give FILE.py:FUNCTION.")
    try:
        for number, record in enumerate(function()):
            strange = DataError(f"a {type(record).__name__}, not a dict.")
            yield f"{place} row {number}", dict(record) if isinstance(record, Mapping) else strange
    except (DataError, GeneratorExit):
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = [frame.lineno for frame in frames if frame.filename == str(path.resolve())]
        where = f" in line {line[-1]}" if line else ""
        raise DataError(f"{place} failed{where}: {type(error).__name__}: {error}") from error


def _lines(path: Path) -> Iterator[tuple[str, Record | DataError]]:
    """Yields (location, record) for each line of a JSONL file; skips blank lines."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                return
            if len(line) > LONGEST_LINE:
                raise DataError(
                    f"{path}:{number} has more than {LONGEST_LINE:,} bytes. Is it one JSON object a line?"
                )
            if line.strip():
                yield f"{path}:{number}", _object(line)


def _object(line: bytes) -> Record | DataError:
    try:
        record = parse_json(line)
    except NotJSON as error:
        return DataError(f"{error}.")
    return (
        record
        if isinstance(record, dict)
        else DataError(f"a JSON {type(record).__name__}, not an object.")
    )


def _rows(name: str | Path, rows: Iterator[Record]) -> Iterator[tuple[str, Record | DataError]]:
    return ((f"{name} row {number}", row) for number, row in enumerate(rows))


def _csv(path: Path) -> Iterator[Record]:
    """Yields each line of a CSV file as a dictionary of strings; the first line has the column
    names.
    """
    csv.field_size_limit(LONGEST_LINE)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True, restkey=None)
        for record in reader:
            if None in record or None in record.values():
                names = len(reader.fieldnames or ())
                raise ValueError(f"line {reader.line_num} has not {names} fields, as the first has")
            yield record
        if not reader.fieldnames:
            raise ValueError("it has no first line with the names of the columns")


def _json(path: Path) -> Iterator[Record]:
    """Yields the objects of a JSON file that contains one list of objects."""
    found = parse_json(path.read_bytes())
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError("it is not a list of objects; one object a line belongs in a .jsonl file")
    yield from found


def _parquet(path: Path) -> Iterator[Record]:
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _arrow(path: Path) -> Iterator[Record]:
    """Yields the rows of an Arrow IPC file or stream."""
    with pa.memory_map(str(path)) as file:
        if file.read(len(FILE_MAGIC)) == FILE_MAGIC:
            reader = pa.ipc.open_file(file)
            yield from _batches(
                reader.get_batch(number) for number in range(reader.num_record_batches)
            )
        else:
            yield from _batches(_stream(path))


def _stream(path: Path) -> Iterator[pa.RecordBatch]:
    """Yields the batches of an Arrow stream. Raises ValueError if the end-of-stream marker is
    missing.
    """
    _check_end(path)
    with pa.memory_map(str(path)) as file:
        yield from pa.ipc.open_stream(file)


def _valid(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the batches after validating them: Arrow would follow a corrupt offset out of bounds."""
    for batch in batches:
        batch.validate(full=True)
        yield batch


def _batches(batches: Iterator[pa.RecordBatch]) -> Iterator[Record]:
    for batch in _valid(batches):
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            yield from batch.slice(start, ROWS_AT_ONCE).to_pylist()


def _check_end(path: Path) -> None:
    """Raises ValueError if an Arrow stream lacks its end marker: it was cut between two messages,
    which Arrow accepts as complete.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(END_OF_STREAM)))
        if file.read() != END_OF_STREAM:
            raise ValueError(f"{path.name} is a stream without its end")


def _dataset(folder: Path, split: str) -> Iterator[Record]:
    from datasets import (  # takes a second to import
        Audio,
        Image,
        load_from_disk,
    )

    index = folder / "dataset_dict.json"
    if index.is_file():
        known = json.loads(index.read_text())["splits"]
        if split not in known:
            names = " or ".join(f"{folder}#{name}" for name in known)
            chosen = repr(split) if split else "none"
            raise DataError(f"{folder} holds several splits and {chosen} was chosen. Give {names}.")
        folder = folder / split
    elif split:
        raise DataError(f"{folder} holds one split, without a name. Leave #{split} out.")
    if not (folder / "state.json").is_file():
        raise DataError(
            f"{folder} is not what `datasets` writes with save_to_disk: it holds no state.json."
        )
    for file in json.loads((folder / "state.json").read_text())["_data_files"]:
        for _ in _valid(_stream(folder / file["filename"])):  # `datasets` follows corrupt offsets
            pass
    dataset = load_from_disk(str(folder)).with_format(None)
    for feature in _nested(dataset.info.features):
        if isinstance(feature, Audio | Image):
            feature.decode = False  # keeps the bytes of the file
    yield from dataset


def _nested(feature: Any) -> Iterator[Any]:
    """Yields a feature of `datasets` and all features nested in it."""
    yield feature
    inner = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
    for each in inner:
        if each is not None:
            yield from _nested(each)


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
