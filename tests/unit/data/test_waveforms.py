"""Prompts with waveforms: what a column may hold, and what is said where it can't be used."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import soundfile
from pyarrow import parquet

from rftmega.config import DataConfig, ModelConfig, RolloutConfig, RunConfig
from rftmega.core.errors import DataError
from rftmega.core.types import Prompt
from rftmega.core.waveform_positions import PlacedWaveform
from rftmega.data.media.audio_processor import audio_processor_of
from rftmega.data.media.files import digest_of
from rftmega.data.media_reader import MediaOptions
from rftmega.data.prompt_images import check_images
from rftmega.data.prompts import load_prompts
from rftmega.data.splits import prompts_of
from rftmega.data.supervised import load_supervised
from rftmega.data.tokenizer import Tokenizer
from tests.tiny_audio import AUDIO, AUDIO_END, AUDIO_START, RATE, WAVEFORM, save_tiny_audio

SAMPLES = {"a.wav": 8000, "b.flac": 4321}
TOKENS = {"a.wav": 12, "b.flac": 7}  # of 50 and 28 frames


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("waveforms")
    save_tiny_audio(folder / "model")
    (folder / "data/inside").mkdir(parents=True)
    drawn = np.random.default_rng(0)
    for name, samples in SAMPLES.items():
        soundfile.write(folder / "data/inside" / name, drawn.uniform(-1, 1, samples), RATE)
    soundfile.write(folder / "data/inside/stereo.wav", np.zeros((500, 2)), RATE)
    soundfile.write(folder / "data/inside/slow.wav", np.zeros(500), 8000)
    soundfile.write(folder / "data/inside/long.wav", np.zeros(RATE + 1), RATE)
    soundfile.write(folder / "data/inside/short.wav", np.zeros(99), RATE)
    (folder / "data/inside/words.wav").write_text("once upon a time")
    return folder


def content(folder: Path, name: str) -> bytes:
    return (folder / "data/inside" / name).read_bytes()


def load(folder: Path, records: list[dict[str, Any]], **how: Any) -> list[Prompt]:
    (folder / "data/records.jsonl").write_text("\n".join(map(json.dumps, records)))
    return load_from(folder, folder / "data/records.jsonl", **how)


def load_from(folder: Path, source: Path, **how: Any) -> list[Prompt]:
    limit, columns = how.pop("limit", 60), how.pop("columns", False)
    return load_prompts(
        source,
        Tokenizer(folder / "model"),
        DataConfig(**how),
        max_prompt_tokens=limit,
        columns=columns,
        processor=audio_processor_of(folder / "model"),
        max_images=2,
    )


def letters(text: str) -> list[int]:
    return [ord(letter) - 25 for letter in text]


def heard(name: str) -> list[int]:
    return [AUDIO_START, *[AUDIO] * TOKENS[name], AUDIO_END]


def test_placeholders_are_expanded_where_the_waveforms_are(folder: Path) -> None:
    names = ["inside/a.wav", "inside/b.flac"]
    record = {"prompt": f"x<audio>y{WAVEFORM}z", "label": "1", "audio": names}
    (prompt,) = load(folder, [record])
    wanted = [*letters("x"), *heard("a.wav"), *letters("y"), *heard("b.flac"), *letters("z")]
    assert list(prompt.token_ids) == wanted
    first, second = prompt.images
    assert isinstance(first, PlacedWaveform)
    assert isinstance(second, PlacedWaveform)
    assert (first.start, first.tokens, first.frames, first.positions) == (2, 12, 50, 50)
    assert (second.start, second.tokens, second.frames) == (17, 7, 28)
    assert first.source == str((folder / "data/inside/a.wav").resolve())
    assert first.digest == digest_of(content(folder, "a.wav"))


def test_a_waveform_in_a_chat_stands_where_its_part_or_mark_is(folder: Path) -> None:
    parts = [{"type": "audio"}, {"type": "text", "text": "how many?"}]
    chats = [[{"role": "user", "content": each}] for each in (parts, "<audio>how many?")]
    records = [{"prompt": chat, "label": "1", "audio": "inside/a.wav"} for chat in chats]
    first, second = load(folder, records, limit=100)
    assert first.token_ids == second.token_ids
    assert list(first.token_ids).count(AUDIO) == TOKENS["a.wav"]


def test_bytes_come_from_parquet_and_base64_and_no_reward_is_given_them(folder: Path) -> None:
    inside = content(folder, "b.flac")
    table = pa.table(
        {"prompt": ["<audio>?"], "label": ["1"], "audio": [[{"bytes": inside, "path": "b.flac"}]]}
    )
    parquet.write_table(table, folder / "data/records.parquet")
    (prompt,) = load_from(folder, folder / "data/records.parquet", columns=True)
    text = "data:audio/flac;base64," + base64.b64encode(inside).decode()
    (other,) = load(folder, [{"prompt": "<audio>?", "label": "1", "audio": text}], columns=True)
    for found, name in ((prompt, "b.flac"), (other, "")):
        assert found.images[0].source == inside
        assert found.images[0].tokens == TOKENS["b.flac"]
        assert json.loads(found.record)["audio"] == [name]


A = "inside/a.wav"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no place": ({"audio": A}, r"0 place\(s\) for waveforms and \"audio\" names 1"),
    "no waveform": ({"prompt": "<audio>?"}, r"1 place\(s\) for waveforms and \"audio\" names 0"),
    "too many": ({"audio": [A, A, A]}, r"3 waveforms: rollout\.max_images is 2"),
    "an image": ({"images": ["a.png"]}, r"1 image\(s\), and the model hears and does not see"),
    "a video": ({"videos": ["a.mp4"]}, r"1 video\(s\), and the model hears and does not see"),
    "a number": ({"prompt": "<audio>?", "audio": [7]}, "holds 7: a waveform is a path, bytes"),
    "an address": ({"prompt": "<audio>?", "audio": "https://x/a.wav"}, "is not fetched"),
    "a way out": ({"prompt": "<audio>?", "audio": "../a.wav"}, "leads out of .* the waveforms are"),
    "an image's text": (
        {"prompt": "<audio>?", "audio": "data:image/png;base64,AA"}, "is no waveform: data:audio/"),
    "no file": ({"prompt": "<audio>?", "audio": "none.wav"}, "none.wav can't be read"),
    "words": ({"prompt": "<audio>?", "audio": "inside/words.wav"}, "can't be read as a waveform"),
    "stereo": ({"prompt": "<audio>?", "audio": "inside/stereo.wav"}, "has 2 channels"),
    "another rate": ({"prompt": "<audio>?", "audio": "inside/slow.wav"}, "has 8,000 samples a second"),
    "too long": ({"prompt": "<audio>?", "audio": "inside/long.wav"}, "lasts 1.0 s, .* 1 s at most"),
    "too short": ({"prompt": "<audio>?", "audio": "inside/short.wav"}, "has 99 samples, .* needs 321"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_t_be_used_is_named_with_its_line(name: str, folder: Path) -> None:
    record, said = REFUSED[name]
    with pytest.raises(DataError, match=rf"(?s)records\.jsonl:2.*{said}"):
        load(folder, [{"prompt": "ok", "label": "1"}, {"prompt": "x", "label": "1"} | record])


def test_a_waveform_counts_for_the_prompt_s_length(folder: Path) -> None:
    records = [{"prompt": "<audio>?", "label": "1", "audio": A}]
    assert len(load(folder, records, limit=15)) == 1
    with pytest.raises(DataError, match=r"15 tokens with its 1 .*waveform\(s\)"):
        load(folder, records, limit=14)


def test_a_model_that_hears_nothing_refuses_waveforms(folder: Path, tmp_path: Path) -> None:
    encode = Tokenizer(folder / "model")
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x", "label": "1", "audio": A}))
    with pytest.raises(DataError, match="the model has no tower that hears"):
        load_prompts(tmp_path / "a.jsonl", encode, DataConfig(), max_prompt_tokens=9)
    limits = {"max_prompt_tokens": 99, "max_response_tokens": 9}
    record = {"prompt": "x", "response": "1", "audio": A}
    (tmp_path / "b.jsonl").write_text(json.dumps(record))
    with pytest.raises(DataError, match="the model has no tower that hears"):
        load_supervised(tmp_path / "b.jsonl", encode, DataConfig(), **limits)


def test_an_answer_about_a_waveform_is_trained_behind_its_features(folder: Path) -> None:
    encode, path = Tokenizer(folder / "model"), folder / "data/given.jsonl"
    path.write_text(json.dumps({"prompt": "<audio>?", "response": "1", "audio": A}))
    media = MediaOptions(audio_processor_of(folder / "model"), max_images=1)
    limits = {"max_prompt_tokens": 99, "max_response_tokens": 9}
    (found,) = load_supervised(path, encode, DataConfig(), media=media, **limits)
    (prompt,) = load(folder, [{"prompt": "<audio>?", "label": "1", "audio": A}])
    assert (found.prompt_ids, found.images) == (prompt.token_ids, prompt.images)


def test_a_column_of_another_name_and_a_folder_elsewhere(folder: Path) -> None:
    record = {"prompt": "<audio>?", "label": "1", "sound": "a.wav"}
    where = str(folder / "data/inside")
    (prompt,) = load(folder, [record], audio_key="sound", media_folder=where)
    assert prompt.images[0].tokens == TOKENS["a.wav"]


def test_each_process_decodes_its_share_and_names_what_is_broken(folder: Path) -> None:
    whole = content(folder, "b.flac")
    broken = whole[:3000] + bytes(60) + whole[3060:]
    (folder / "data/inside/broken.flac").write_bytes(broken)
    records = [
        {"prompt": "<audio>?", "label": "1", "audio": f"inside/{name}"}
        for name in ("a.wav", "broken.flac", "b.flac")
    ]
    (folder / "data/records.jsonl").write_text("\n".join(map(json.dumps, records)))
    config = RunConfig(
        model=ModelConfig(path=str(folder / "model")),
        data=DataConfig(train=str(folder / "data/records.jsonl")),
        rollout=RolloutConfig(max_prompt_tokens=60),
    )
    said = []
    for rank in range(2):
        try:
            prompts_of(config, Tokenizer(folder / "model"), check=len, rank=rank, ranks=2)
        except DataError as error:
            said.append(str(error))
    assert len(said) == 1, "one of two processes has it"
    assert "records.jsonl:2" in said[0]
    assert "broken.flac is broken" in said[0]


def test_what_changed_since_it_was_read_is_refused(folder: Path) -> None:
    path = folder / "data/inside/changed.wav"
    path.write_bytes(content(folder, "a.wav"))
    prompts = load(folder, [{"prompt": "<audio>?", "label": "1", "audio": "inside/changed.wav"}])
    soundfile.write(path, np.zeros(8000), RATE)
    with pytest.raises(DataError, match="has changed since the data were read"):
        check_images(
            prompts, ["here"], rank=0, ranks=1, audio_processor=audio_processor_of(folder / "model")
        )
