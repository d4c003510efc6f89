"""Every reader with files that are cut off, damaged, empty, noise or of another format: what leaves
`records` is the project's own error.
"""

import datetime
import gzip
import json
import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from rftmega.core.errors import DataError
from rftmega.data.records import records

datasets.disable_progress_bars()
ROWS = [{"prompt": [{"role": "user", "content": f"{i}+é"}], "label": str(i)} for i in range(40)]
TYPED = [
    {
        "prompt": f'say "{i}",\n',
        "label": i / 2,
        "when": datetime.datetime(2026, 1, 1 + i, tzinfo=datetime.UTC),
        "day": datetime.date(2026, 1, 1 + i),
        "much": Decimal("1.50") * i,
        "long": datetime.timedelta(seconds=i),
        "raw": bytes([i, 255]),
    }
    for i in range(9)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
TABLE = 'prompt,label\n"say ""1"",\n",1\né,2\n'.encode()


def table(rows: list[dict[str, Any]]) -> pa.Table:
    found = pa.Table.from_pylist(rows)
    return found.append_column(
        "word", pa.array(["a", None] * 20).slice(0, len(rows)).dictionary_encode()
    )


def arrow(path: Path, rows: list[dict[str, Any]], new: Callable[..., Any]) -> None:
    with new(path, table(rows).schema) as writer:
        writer.write_table(table(rows), max_chunksize=4)


def saved(folder: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))


def splits(folder: Path) -> None:
    both = {name: datasets.Dataset.from_list(ROWS[:3]) for name in ("train", "test")}
    datasets.DatasetDict(both).save_to_disk(str(folder))


def hub(folder: Path) -> None:
    folder.mkdir()
    (folder / "train-00000.jsonl").write_bytes(LINES)
    (folder / "train-00001.csv").write_bytes(TABLE)


# name of the file or folder, its split, and what writes it
FILES: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "lines": ("a.jsonl", "", lambda path: path.write_bytes(LINES)),
    "packed lines": ("a.jsonl.gz", "", lambda path: path.write_bytes(gzip.compress(LINES * 9))),
    "JSON": ("a.json", "", lambda path: path.write_text(json.dumps(ROWS))),
    "CSV": ("a.csv", "", lambda path: path.write_bytes(TABLE * 3)),
    "Parquet": ("a.parquet", "", lambda path: parquet.write_table(table(ROWS), path)),
    "typed Parquet": ("b.parquet", "", lambda path: parquet.write_table(table(TYPED), path)),
    "packed Parquet": (
        "c.parquet",
        "",
        lambda path: parquet.write_table(table(ROWS), path, compression="zstd"),
    ),
    "Arrow file": ("a.arrow", "", lambda path: arrow(path, ROWS, pa.ipc.new_file)),
    "typed Arrow file": ("b.arrow", "", lambda path: arrow(path, TYPED, pa.ipc.new_file)),
    "Arrow stream": ("c.arrow", "", lambda path: arrow(path, ROWS, pa.ipc.new_stream)),
    "folder": ("saved", "", saved),
    "folder of splits": ("splits", "#train", splits),
    "folder of the hub": ("hub", "#train", hub),
}
NOISE = random.Random(0).randbytes(600)
OTHERS = (
    b"",
    b"\0",
    b"\n\n",
    NOISE,
    b"\xff\xfe{\0}\0",
    LINES,
    TABLE,
    gzip.compress(NOISE),
    gzip.compress(LINES)[:-6],
    b"PAR1" + NOISE + b"PAR1",
    b"ARROW1\0\0" + NOISE + b"ARROW1",
    b"[]",
    b"{}",
    b"[1]",
    b"[[[[",
    b"null",
    b"[" * 5000,
    b"1" * 5000,
    b'{"splits": 7}',
    b'{"splits": ["train"], "_data_files": [7]}',
    b'{"_data_files": [{"filename": "../../x"}], "features": {"a": {"_type": "No"}}}',
)


def damaged(whole: bytes) -> Iterator[bytes]:
    """Yields a file cut at some places, with bytes flipped at some, with noise inside, and others."""
    drawn = random.Random(len(whole))
    step = max(1, len(whole) // 24)
    for place in range(0, len(whole), step):
        yield whole[:place]
        yield whole[:place] + bytes([whole[place] ^ (1 << drawn.randrange(8))]) + whole[place + 1 :]
        yield whole[:place] + NOISE[:7] + whole[place + 7 :]
        yield whole[:place] + whole[place + 3 :]
    yield whole + NOISE
    yield whole * 2
    yield from OTHERS


def outcome(source: str) -> str:
    """Returns "read", or "refused" for a file or some of its records. Any error but DataError goes on."""
    try:
        told = [found for _, found in records(source)]
    except DataError as error:
        named = source.partition("#")[0] in str(error)
        return "refused" if named else "refused without a name"
    assert all(isinstance(each, dict | DataError) for each in told)
    return "refused" if any(isinstance(each, DataError) for each in told) else "read"


@pytest.mark.parametrize("kind", FILES)
def test_no_broken_file_is_answered_with_another_error(kind: str, tmp_path: Path) -> None:
    name, split, write = FILES[kind]
    path = tmp_path / name
    write(path)
    assert outcome(f"{path}{split}") == "read"
    outcomes = set()
    for file in sorted(path.rglob("*") if path.is_dir() else [path]):
        whole = file.read_bytes() if file.is_file() else None
        for content in damaged(whole) if whole is not None else ():
            file.write_bytes(content)
            outcomes.add(outcome(f"{path}{split}"))
        if whole is not None:
            file.write_bytes(whole)
    assert outcomes in ({"refused"}, {"refused", "read"})


@pytest.mark.parametrize("kind", FILES)
def test_a_folder_a_link_to_nothing_and_a_missing_file_are_refused(
    kind: str, tmp_path: Path
) -> None:
    name, split, _ = FILES[kind]
    path = tmp_path / name
    assert outcome(f"{path}{split}") == "refused"
    path.symlink_to(tmp_path / "nothing")
    assert outcome(f"{path}{split}") == "refused"
    path.unlink()
    path.symlink_to(path)
    assert outcome(f"{path}{split}") == "refused"
    path.unlink()
    path.mkdir()
    assert outcome(f"{path}{split}") == "refused"


def test_what_a_table_of_text_and_packed_lines_lack_is_said(tmp_path: Path) -> None:
    quoted = tmp_path / "a.csv"
    quoted.write_bytes(b'prompt,label\na,b\n"c"x,e\n')
    with pytest.raises(DataError, match=r"a\.csv can't be read: .*Is it whole"):
        list(records(quoted))
    quoted.write_bytes(b'prompt,label\na,b\n"c ,e\n')
    with pytest.raises(DataError, match=r"a\.csv can't be read: unexpected end of data"):
        list(records(quoted))
    packed = bytearray(gzip.compress(LINES * 9))
    packed[60:62] = b"\xff\x5a"
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz can't be read"):
        list(records(tmp_path / "a.jsonl.gz"))


@pytest.mark.parametrize(
    "body",
    [
        "import sys\n    sys.exit(3)",
        "raise SystemExit",
        "return 7",
        "yield from {}['a']",
    ],
)
def test_a_function_of_the_users_that_fails_is_named(body: str, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(f"def rows():\n    {body}\n")
    with pytest.raises(DataError, match=r"a\.py:rows failed"):
        list(records(f"{path}:rows"))
