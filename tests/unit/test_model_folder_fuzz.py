"""Files of a model folder, damaged in every way: what comes of them is a model or the project's
error, nothing else.
"""

import contextlib
import copy
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rftmega.backends.megatron.load import refuse_strangers
from rftmega.converters import table
from rftmega.core.errors import RFTMegaError
from rftmega.data.tokenizer import Tokenizer
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.models.hf.hf_folder import INDEX, HFFolder
from tests.tiny_models import save_tiny
from tests.unit.core.test_json_files import VALUES
from tests.unit.data.test_tokenizer import CHATML, tokenizer

ODD = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        2**63,
        10**30,
        1e300,
        -0.5,
        "",
        "128",
        [],
        [0],
        {},
        {"a": {}},
        "\ud800",
        [[[]]],
    ]
)
CASES = settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value."""
    for key in (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    ):
        yield value, key
        yield from places(value[key])


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file of JSON with other values, without some, cut off, or with other bytes."""
    value = json.loads(content)
    for _ in range(draw(st.integers(0, 2))):
        if not (found := list(places(value))):
            break
        container, key = found[draw(st.integers(0, len(found) - 1))]
        if draw(st.booleans()):
            container[key] = copy.deepcopy(draw(ODD | VALUES))
        else:
            del container[key]
    text = bytearray(json.dumps(value).encode(errors="surrogatepass"))
    match draw(st.integers(0, 5)):
        case 0:
            return bytes(text[: draw(st.integers(0, len(text)))])
        case 1:
            place = draw(st.integers(0, len(text) - 1))
            text[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
        case 2:
            return json.dumps(draw(ODD | VALUES)).encode()
    return bytes(text)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without the warnings of transformers."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny(tmp_path_factory.mktemp("model"), "qwen3-moe")
    tokenizer(path, CHATML)
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 2], "temperature": 0.6})
    )
    return path


@contextlib.contextmanager
def content_of(path: Path, content: bytes) -> Iterator[None]:
    """Within, `path` holds `content`, and what is raised is the project's error."""
    before = path.read_bytes() if path.is_file() else None
    path.write_bytes(content)
    try:
        with contextlib.suppress(RFTMegaError):
            yield
    finally:
        path.write_bytes(before) if before is not None else path.unlink()


def understand(folder: Path) -> None:
    hf_config = read_hf_config(folder)
    describe(hf_config)
    table(hf_config)


def tokenise(folder: Path) -> None:
    ours = Tokenizer(folder)
    ours.encode("1+2", chat_template=False)
    ours.encode("1+2", chat_template=True)
    ours.encode_response("1+", "2", chat_template=True)


def load(folder: Path) -> None:
    files, hf_config = HFFolder(folder), json.loads((folder / "config.json").read_text())
    refuse_strangers(files, table(hf_config), hf_config, experts=4, allowed=frozenset())
    files.whole("model.norm.weight", (64,))
    files.slice_of("model.embed_tokens.weight", (131, 64))[:2]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", understand),
        ("generation_config.json", tokenise),
        ("tokenizer_config.json", tokenise),
        ("tokenizer.json", tokenise),
        (INDEX, load),
    ],
)
def test_a_damaged_file_is_read_or_refused(
    name: str, read: Callable[[Path], None], folder: Path
) -> None:
    names = ["model.norm.weight", "model.embed_tokens.weight"]
    index = json.dumps(
        {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    ).encode()
    whole = index if name == INDEX else (folder / name).read_bytes()

    @CASES
    @given(content=damaged(whole))
    def check(content: bytes) -> None:
        with content_of(folder / name, content):
            read(folder)

    check()


def test_a_damaged_header_of_weights_is_read_or_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = whole[8 : 8 + length], whole[8 + length :]

    @CASES
    @given(
        header=damaged(header),
        said=st.none() | st.integers(0, 2**64 - 1),
        end=st.none() | st.integers(0, 2000),
    )
    def check(header: bytes, said: int | None, end: int | None) -> None:
        said = len(header) if said is None else said
        with content_of(path, (said.to_bytes(8, "little") + header + data)[:end]):
            load(folder)

    check()
