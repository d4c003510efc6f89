import contextlib
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from rftmega.core.errors import DataError
from rftmega.data.records import records

datasets.disable_progress_bars()
RECORDS = [
    {"prompt": [{"role": "user", "content": f"{i}+{i}"}], "label": str(2 * i)} for i in range(2500)
]


def table() -> pa.Table:
    return pa.Table.from_pylist(RECORDS)


def write_arrow(path: Path, new: Callable[..., Any]) -> Path:
    with new(path, table().schema) as writer:
        writer.write_table(table(), max_chunksize=1500)
    return path


def write_parquet(path: Path) -> Path:
    parquet.write_table(table(), path, row_group_size=1500, write_page_checksum=True)
    return path


def write_folder(path: Path) -> Path:
    """Of two files, in an order that is not the one in which the rows were made."""
    dataset = datasets.Dataset.from_list(RECORDS[::-1])
    dataset.select(range(len(dataset) - 1, -1, -1)).save_to_disk(str(path), num_shards=2)
    return path


def write_json(path: Path) -> Path:
    path.write_text(json.dumps(RECORDS))
    return path


def write_script(path: Path) -> Path:
    path.write_text(
        "def rows():\n"
        "    for i in range(2500):\n"
        "        message = {'role': 'user', 'content': f'{i}+{i}'}\n"
        "        yield {'prompt': [message], 'label': str(2 * i)}\n"
    )
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "Parquet": lambda folder: write_parquet(folder / "a.parquet"),
    "Arrow file": lambda folder: write_arrow(folder / "a.arrow", pa.ipc.new_file),
    "Arrow stream": lambda folder: write_arrow(folder / "b.arrow", pa.ipc.new_stream),
    "folder": lambda folder: write_folder(folder / "saved"),
    "JSON": lambda folder: write_json(folder / "a.json"),
    "script": lambda folder: Path(f"{write_script(folder / 'a.py')}:rows"),
}


@pytest.mark.parametrize("kind", list(WRITERS))
def test_every_format_gives_its_records_in_order_with_their_place(
    kind: str, tmp_path: Path
) -> None:
    path = WRITERS[kind](tmp_path)
    assert list(records(path)) == [(f"{path} row {i}", record) for i, record in enumerate(RECORDS)]


def test_a_split_of_a_folder_is_named_behind_its_path(tmp_path: Path) -> None:
    both = {
        "train": datasets.Dataset.from_list([{"a": 1}]),
        "test": datasets.Dataset.from_list([{"a": 2}]),
    }
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "saved"))
    assert list(records(f"{tmp_path}/saved#test")) == [(f"{tmp_path}/saved#test row 0", {"a": 2})]
    for name, complaint in (
        ("", "none was chosen. Give .*saved#train or .*saved#test"),
        ("#dev", "'dev' was chosen"),
    ):
        with pytest.raises(DataError, match=complaint):
            list(records(f"{tmp_path}/saved{name}"))
    with pytest.raises(DataError, match="holds one split, without a name. Leave #train out"):
        list(records(f"{tmp_path}/saved/train#train"))


def test_json_inside_a_folder_comes_as_what_it_says(tmp_path: Path) -> None:
    rows = [{"a": [{"x": 1}, "text"]}, {"a": {"y": 2}}]
    features = datasets.Features({"a": datasets.Json()})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    assert [record for _, record in records(tmp_path / "saved")] == rows


def test_a_hash_sign_in_a_files_name_is_no_split(tmp_path: Path) -> None:
    path = tmp_path / "a#b.jsonl"
    path.write_text("{}\n")
    assert list(records(path)) == [(f"{path}:1", {})]
    with pytest.raises(DataError, match="only a folder of `datasets` has splits"):
        list(records(f"{path}#train"))


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"a":\r"\u2028"}\r\n\n{"a": 1}'.encode())
    assert list(records(tmp_path / "a.jsonl")) == [
        (f"{tmp_path}/a.jsonl:1", {"a": "\u2028"}),
        (f"{tmp_path}/a.jsonl:3", {"a": 1}),
    ]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("a.xml", "known: .jsonl, .jsonl.gz, .json, .csv, .parquet, .arrow, a folder"),
        ("a", "no suffix that is known"),
        ("b.parquet", "can't be read"),
    ],
)
def test_what_is_no_data_is_refused_by_name(name: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text("<prompt/>")
    (tmp_path / "a").write_text("{}")
    (tmp_path / "b.parquet").write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError, match=complaint) as caught:
        list(records(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it holds no state.json"):
        list(records(tmp_path))


def cuts(size: int) -> Iterator[int]:
    """Places to cut a file of `size` bytes, the first and the last among them."""
    yield from (0, 1, 7, 8, size - 9, size - 8, size - 1)
    yield from range(9, size, max(1, size // 40))


@pytest.mark.parametrize("kind", sorted(WRITERS.keys() - {"script"}))
def test_a_file_that_was_cut_off_anywhere_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path)
    file = next(path.glob("*-00001-*.arrow")) if path.is_dir() else path
    whole = file.read_bytes()
    for length in cuts(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(DataError, match="can't be read") as caught:
            list(records(path))
        assert str(path) in str(caught.value)


def test_a_stream_that_was_cut_between_two_batches_is_refused(tmp_path: Path) -> None:
    path = WRITERS["Arrow stream"](tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match="a stream without its end"):
        list(records(path))


@pytest.mark.parametrize("kind", ["Parquet", "Arrow file", "Arrow stream"])
def test_a_damaged_byte_is_refused_or_changes_a_value_at_most(kind: str, tmp_path: Path) -> None:
    """Arrow has no checksums, so a letter may change; Parquet's pages have one here, and no value
    changes.
    """
    path = WRITERS[kind](tmp_path)
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with contextlib.suppress(DataError):
            found = [record for _, record in records(path)]
            assert len(found) == len(RECORDS)
            assert kind != "Parquet" or [list(r.values()) for r in found] == [
                list(r.values()) for r in RECORDS
            ]


def test_images_inside_a_folder_come_as_their_files_bytes_and_are_not_decoded(
    tmp_path: Path,
) -> None:
    broken = {"bytes": b"no image", "path": None}
    rows = [{"one": broken, "many": [broken, broken], "deep": {"inside": [{"it": broken}]}}]
    image = datasets.Image()
    features = datasets.Features(
        {
            "one": image,
            "many": datasets.List(datasets.Image()),
            "deep": {"inside": datasets.List({"it": datasets.Image()})},
        }
    )
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    assert [record for _, record in records(tmp_path / "saved")] == rows


def test_sounds_inside_a_folder_come_as_their_files_bytes_and_are_not_decoded(
    tmp_path: Path,
) -> None:
    rows = [{"audio": [{"bytes": b"no sound", "path": "a.wav"}]}]
    features = datasets.Features({"audio": datasets.List(datasets.Audio())})
    datasets.Dataset.from_list(rows).cast(features).save_to_disk(str(tmp_path / "saved"))
    assert [record for _, record in records(tmp_path / "saved")] == rows


def test_lines_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "1+1"}\n\n{"prompt": "2+2"}\n'))
    found = [(f"{path}:1", {"prompt": "1+1"}), (f"{path}:3", {"prompt": "2+2"})]
    assert list(records(path)) == found
    path.write_bytes(path.read_bytes()[:-9])  # cut off
    with pytest.raises(DataError, match="can't be read"):
        list(records(path))


def test_columns_of_a_table_of_text_are_named_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ufeffprompt,label\n"1,\n+1",2\n"say ""x""",\n')
    rows = [{"prompt": "1,\n+1", "label": "2"}, {"prompt": 'say "x"', "label": ""}]
    assert [record for _, record in records(path)] == rows


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "prompt,label\n1\n", "line 2 has not 2 fields"),
        ("a.csv", "prompt,label\n1,2,3\n", "line 2 has not 2 fields"),
        ("a.csv", "", "no first line with the names"),
        ("a.json", '{"prompt": "a"}', "not a list of objects"),
        ("a.json", '[{"prompt": "a"}', "can't be read"),
        ("a.py", "def rows(): return [1]", "row 0: a int, not a dict"),
        (
            "a.py",
            "def rows():\n    yield {}\n    1 / 0",
            "rows failed in line 3: ZeroDivisionError",
        ),
        ("a.py", "rows = 1", "there is no function 'rows'"),
        ("a.py", "1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    source = f"{path}:rows" if path.suffix == ".py" else path
    try:
        told = [f"{place}: {record}" for place, record in records(source)]
    except DataError as error:
        told = [str(error)]
    assert any(said in each for each in told), told
