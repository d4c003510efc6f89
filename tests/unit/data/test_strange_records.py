"""Lines that no data set should have: each is told with its file and line, never as a traceback."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.data.preference import load_preferences
from rftmega.data.prompts import load_prompts
from rftmega.data.records import readers, records
from rftmega.data.supervised import load_supervised
from rftmega.data.tokenizer import Tokenizer
from tests.chat_formats import FORMATS, tokenizer

GOOD = b'{"prompt": "1+1=", "label": "2"}\n'


class Letters:
    stop_ids = (0,)

    def encode(self, prompt: Any, *, chat_template: bool) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            raise DataError("no chat messages, as the real one says of what are none")
        return tuple(map(ord, prompt))


def load(path: Path) -> list[Any]:
    return load_prompts(path, Letters(), DataConfig(), max_prompt_tokens=100)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"[" * 200_000 + b"]" * 200_000, "nested more than"),
        (b'{"prompt": "\\ud800", "label": "2"}', "lone surrogate"),
        (b'{"prompt": "a", "prompt": "b", "label": "2"}', "the key 'prompt' is there twice"),
        (b'{"prompt": "a", "label": NaN}', "NaN is no JSON"),
        (b'{"prompt": "a", "label": -Infinity}', "-Infinity is no JSON"),
        (b'{"prompt": "a", "label": 1e999}', "too large"),
        (b'{"prompt": "a", "label": true}', '"label" must be a string or a number, not bool'),
        (b'{"prompt": "a", "label": null}', '"label" must be a string or a number, not NoneType'),
        (b'{"prompt": "caf\xe9", "label": "2"}', "not UTF-8"),
        (b'"text"', "a JSON str, not an object"),
        (b"\0\0\0", "not JSON"),
    ],
)
def test_a_strange_line_is_named(line: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD + b'{"label": 1}\n')
    with pytest.raises(DataError) as raised:
        load(path)
    first, second = str(raised.value).splitlines()
    assert first.startswith(f"{path}:2: ")
    assert told in first
    assert second.startswith(f"{path}:4: ")


def test_a_line_without_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LONGEST_LINE", 100)
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD + b'{"prompt": "' + b"a" * 200 + b'"}')
    with pytest.raises(DataError, match="train.jsonl:2 has more than 100 bytes"):
        list(records(path))
    path.write_bytes(GOOD + b'{"prompt": "' + b"a" * 20 + b'"}')
    assert len(list(records(path))) == 2


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert [prompt.label for prompt in load(path)] == ["2"]


@pytest.mark.parametrize("label", [float("nan"), float("inf")])
def test_labels_of_other_formats_are_numbers_too(label: float, tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    parquet.write_table(
        pa.Table.from_pylist([{"prompt": "a", "label": 1.5}, {"prompt": "b", "label": label}]), path
    )
    with pytest.raises(DataError, match=f'row 1: "label" is {label}: no answer equals it'):
        load(path)


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
lines = st.one_of(
    st.binary(max_size=80),
    st.text('{}[]",:\\\\ud8ptrue01 \t\r', max_size=60).map(str.encode),
    st.dictionaries(st.sampled_from(["prompt", "label", "kind", "x"]), values).map(
        lambda record: json.dumps(record).encode()
    ),
)


@settings(max_examples=200, deadline=None)
@given(content=st.lists(lines, max_size=4).map(b"\n".join))
def test_no_data_file_is_answered_with_a_traceback(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    path.write_bytes(content)
    with contextlib.suppress(DataError):
        load(path)


words = st.one_of(
    st.none(),
    st.sampled_from(["user", "assistant", "human", "gpt", "[]", "{", "text", ""]),
    st.text(max_size=3),
)
fields = st.sampled_from(
    [
        "role",
        "content",
        "from",
        "value",
        "tool_calls",
        "function_call",
        "reasoning_content",
        "type",
        "text",
        "function",
    ]
    + ["name", "arguments", "image", "image_url", "url", "id"]
)
things = st.recursive(
    st.one_of(words, st.integers(), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(fields, inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("qwen3"), FORMATS["qwen3"])


@settings(max_examples=300, deadline=None)
@example(messages=[{"content": [{"type": []}]}])
@given(
    messages=st.one_of(things, st.lists(st.dictionaries(fields, things, max_size=4), max_size=3))
)
def test_no_chat_is_answered_with_a_traceback(
    messages: Any, real: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "chats.jsonl"
    record = {"prompt": messages, "label": "1", "chosen": messages, "rejected": messages}
    given_answer = record | {"prompt": "a", "response": messages}
    path.write_text(json.dumps(record) + "\n" + json.dumps(given_answer))
    limits = {"max_prompt_tokens": 999, "max_response_tokens": 999}
    with contextlib.suppress(DataError):
        load_prompts(path, real, DataConfig(), columns=True, max_prompt_tokens=999)
    for read in (load_supervised, load_preferences):
        with contextlib.suppress(DataError):
            read(path, real, DataConfig(chat_template=True, trained_turns="all"), **limits)


@settings(max_examples=200, deadline=None)
@given(
    content=st.binary(max_size=300),
    name=st.sampled_from(["fuzzed.parquet", "fuzzed.arrow"]),
    cut=st.integers(0, 400),
)
def test_no_table_is_answered_with_a_traceback(
    content: bytes, name: str, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Noise alone, and in the middle of a good file."""
    path = tmp_path_factory.getbasetemp() / name
    if name.endswith("parquet"):
        parquet.write_table(pa.Table.from_pylist([{"prompt": "a", "label": "b"}]), path)
    else:
        with pa.ipc.new_file(path, pa.schema([("prompt", pa.string())])) as writer:
            writer.write_table(pa.Table.from_pylist([{"prompt": "a"}]))
    good = path.read_bytes()
    path.write_bytes(
        content if cut > len(good) else good[:cut] + content + good[cut + len(content) :]
    )
    with contextlib.suppress(DataError):
        load(path)
