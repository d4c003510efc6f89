"""Images, videos and waveforms inside the parts of chat messages, as published records have them."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.core.types import Prompt
from rftmega.data.chat.media_parts import media_moved, with_media_moved
from rftmega.data.media.image_processor import processor_of
from rftmega.data.preference import load_preferences
from rftmega.data.prompts import load_prompts
from rftmega.data.supervised import load_supervised
from rftmega.data.tokenizer import Tokenizer
from tests.chat_formats import PLAIN, tokenizer
from tests.tiny_vision import save_tiny_vision


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    save_tiny_vision(folder / "model", "qwen2_5_vl")
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "a.png")
    return folder


def content(folder: Path) -> bytes:
    return (folder / "a.png").read_bytes()


def load(folder: Path, source: Path, **settings: Any) -> list[Prompt]:
    return load_prompts(
        source,
        Tokenizer(folder / "model"),
        DataConfig(media_folder=str(folder), **settings),
        max_prompt_tokens=400,
        columns=True,
        processor=processor_of(folder / "model"),
        max_images=2,
    )


def record(*parts: Any, **columns: Any) -> dict[str, Any]:
    text = {"type": "text", "text": "xyz"}
    return {"prompt": [{"role": "user", "content": [*parts, text]}], "label": "1", **columns}


def in_text(folder: Path) -> str:
    return base64.b64encode(content(folder)).decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,{base64}"}},
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}},
        {"type": "image_url", "image_url": "a.png"},
        {"type": "image", "image": "a.png"},
        {"type": "image", "image": "{folder}/a.png"},
        {"type": "image", "image": "file://{folder}/a.png"},
        {"type": "image", "url": "a.png"},
        {"type": "image", "path": "a.png", "url": None},
        {"type": "image", "base64": "{base64}"},
        {"type": "image", "image": {"path": "a.png", "bytes": None}},
        {"type": "input_image", "image_url": "data:image/png;base64,{base64}"},
    ],
)
def test_a_image_inside_a_part_is_the_image_of_a_column(part: Any, folder: Path) -> None:
    text = json.dumps(part).replace("{base64}", in_text(folder)).replace("{folder}", str(folder))
    inside = record(json.loads(text))
    beside = record({"type": "image"}, images=["a.png"])
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, (inside, beside))))
    one, other = load(folder, folder / "a.jsonl")
    assert one.token_ids == other.token_ids
    assert [each.digest for each in one.images] == [each.digest for each in other.images]
    assert [(each.start, each.tokens) for each in one.images] == [
        (each.start, each.tokens) for each in other.images
    ]
    kept = json.loads(one.record)
    assert kept["prompt"] == json.loads(other.record)["prompt"]
    assert in_text(folder) not in one.record


def test_bytes_inside_parts_of_a_table_are_a_image(folder: Path) -> None:
    part = {"type": "image", "text": None, "image": {"bytes": content(folder), "path": None}}
    text = {"type": "text", "text": "xyz", "image": None}
    rows = [{"prompt": [{"role": "user", "content": [part, text]}], "label": "1"}]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    (found,) = load(folder, folder / "a.parquet")
    (folder / "a.jsonl").write_text(json.dumps(record({"type": "image"}, images=["a.png"])))
    (other,) = load(folder, folder / "a.jsonl")
    assert found.token_ids == other.token_ids
    assert found.images[0].digest == other.images[0].digest


def test_images_of_several_messages_keep_their_order(folder: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (100, 50)).save(buffer, "PNG")
    second = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    messages = [
        {"role": "user", "content": [{"type": "image", "image": "a.png"}]},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": second}}]},
    ]
    (folder / "a.jsonl").write_text(json.dumps({"conversations": messages, "label": "1"}))
    (found,) = load(folder, folder / "a.jsonl", prompt_key="conversations")
    assert [each.source for each in found.images] == [str(folder / "a.png"), buffer.getvalue()]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            record({"type": "image", "image": "a.png"}, images=["a.png"]),
            "Put all of them in one of the two",
        ),
        (record({"type": "image_url", "image_url": {"uri": "a.png"}}), "url, path, bytes, base64"),
        (record({"type": "image", "image": "../b.png"}), "leads out of"),
        (record({"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}), "https://x"),
        (record({"type": "video", "video": "a.mp4"}), "rollout.max_videos"),
        (record({"type": "input_audio", "input_audio": {"data": "AA=="}}), "no tower that hears"),
    ],
)
def test_what_can_not_be_shown_is_refused_by_record(given: Any, said: str, folder: Path) -> None:
    (folder / "a.jsonl").write_text(json.dumps(given))
    with pytest.raises(DataError, match=r"a\.jsonl:1: ") as caught:
        load(folder, folder / "a.jsonl")
    assert said in str(caught.value)


def test_a_model_of_text_refuses_images_inside_parts(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, PLAIN["chatml"])
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record({"type": "image", "image": "a.png"})))
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*the model has no vision tower"):
        load_prompts(path, ours, DataConfig(), max_prompt_tokens=99)


def test_preferences_and_text_models_refuse_images_inside_parts(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, PLAIN["chatml"])
    path = tmp_path / "a.jsonl"
    completions = {"response": "a", "chosen": "a", "rejected": "b"}
    path.write_text(json.dumps(record({"type": "image", "image": "a.png"}, **completions)))
    limits = {"max_prompt_tokens": 99, "max_response_tokens": 99}
    for read, said in (
        (load_supervised, "the model has no vision tower"),
        (load_preferences, "responses and preferences are text alone so far"),
    ):
        with pytest.raises(DataError, match=rf"a\.jsonl:1: .*{said}"):
            read(path, ours, DataConfig(), **limits)


def test_videos_and_waveforms_are_moved_to_their_columns() -> None:
    parts = [
        {"type": "video_url", "video_url": {"url": "a.mp4"}},
        {"type": "video", "video": "frames"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "audio", "audio": "b.flac"},
    ]
    given = record(*parts)
    prompt, moved = media_moved(given["prompt"], given, DataConfig(audio_key="sounds"))
    assert moved["videos"] == ["a.mp4", "frames"]
    assert moved["sounds"] == ["data:audio/wav;base64,AAAA", "b.flac"]
    assert [part["type"] for part in prompt[0]["content"]] == ["video"] * 2 + ["audio"] * 2 + [
        "text"
    ]
    assert moved["prompt"] == prompt


def test_addresses_inside_parts_are_known_before_the_records_are_read() -> None:
    """They are fetched ahead; a record that can't be read is told later."""
    part = {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}
    bad = record({"type": "image", "image": {"no": 1}})
    found = list(with_media_moved([record(part), bad, {"prompt": 7}], DataConfig()))
    assert found[0]["images"] == ["https://x.org/a.png"]
    assert found[1:] == [bad, {"prompt": 7}]
