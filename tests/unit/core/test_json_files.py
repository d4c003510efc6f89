"""Files of JSON that others wrote: read, or refused with file and line."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftmega.core.errors import CheckpointError, DataError
from rftmega.core.json_files import DEEPEST, NotJSON, parse_json, read_json, read_json_object

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None, max_examples=200)
@given(value=VALUES, indent=st.sampled_from([None, 1]), ascii_=st.booleans(), mark=st.booleans())
def test_whatever_json_writes_comes_back(
    value: object, indent: int | None, ascii_: bool, mark: bool
) -> None:
    content = json.dumps(value, indent=indent, ensure_ascii=ascii_).encode()
    assert parse_json((b"\xef\xbb\xbf" if mark else b"") + content) == value


@settings(deadline=None, max_examples=200)
@given(
    content=st.binary(max_size=200)
    | st.text(alphabet='{}[]",:\\udDcC089aeE.+-nulltrfs \n', max_size=200).map(str.encode)
    | VALUES.flatmap(
        lambda value: st.integers(0, 60).map(lambda end: json.dumps(value).encode()[:end])
    )
)
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    line = 1
    try:
        parse_json(content)
    except NotJSON as error:
        line = error.line or 1
    assert 1 <= line <= content.count(b"\n") + 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", ":1: not JSON"),
        (b'{"a": 1,\n "b": }', ":2: not JSON"),
        (b'{"a": 1}\n\xff', ":2: not UTF-8 (byte 0xff)"),
        (b'\xff\xfe{\x00"\x00', ":1: not UTF-8"),
        (b'{"a": 1,\n "b": 2,\n "a": 3}', ":3: the key 'a' is there twice"),
        (b'{"b": {"a": 1, "\\u0061": 2}}', ": the key 'a' is there twice"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"a": -Infinity}', "-Infinity is no JSON"),
        (b'{"a": 1e999}', "the number 1e999 is too large"),
        (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
        (b'{"a": "x",\n"b": "\\ud83d"}', ":2: \\ud83d is half a character"),
        (b'{"a": "\\ude00\\ud83d"}', "\\ude00 is half a character"),
        (b'{"\\uDC00": 1}', "\\uDC00 is half a character"),
        (b'{"a":\n' + b"[" * 200_000 + b"]" * 200_000 + b"}", f":2: objects and lists are nested more than {DEEPEST} deep"),
        (b'{"a":' * 200_000, f"nested more than {DEEPEST} deep"),
    ],
)  # fmt: skip
def test_what_is_not_strict_json_is_refused_with_file_and_line(
    content: bytes, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as refusal:
        read_json(path)
    assert str(refusal.value).startswith(f"{path}:")
    assert complaint in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        '"\\ud83d\\ude00"',
        '"\\\\ud83d"',
        '{"a": [1], "b": {"a": 1}}',
        "[" * 200 + "]" * 200,
        '"' + "[" * 999 + '"',
    ],
)
def test_what_only_looks_odd_is_read(text: str) -> None:
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("[1]", "a list"),
        ('"x"', "a string"),
        ("3", "a number"),
        ("null", "null"),
        ("true", "true or false"),
    ],
)
def test_another_value_than_an_object_is_refused(content: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=f"a.json holds {kind}, not an object"):
        read_json_object(tmp_path / "a.json", raising=DataError)


@pytest.mark.parametrize("what", ["missing", "a folder", "a loop", "a pipe"])
def test_what_is_no_file_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    if what == "a folder":
        path.mkdir()
    if what == "a loop":
        path.symlink_to(path)
    if what == "a pipe":
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"a\.json"):
        read_json(path)
