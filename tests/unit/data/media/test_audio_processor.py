"""Frames and the number of features, which is known without decoding, are those of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor, WhisperFeatureExtractor

from rftmega.core.errors import CheckpointError, DataError
from rftmega.core.media_positions import RowImages, unexpanded
from rftmega.core.waveform_positions import PlacedWaveform
from rftmega.data.media import cache
from rftmega.data.media.audio_processor import AudioProcessor
from rftmega.data.media.files import digest_of
from rftmega.data.media.waveform_inputs import waveform_tensors
from rftmega.data.media.waveforms import wav_of
from tests.tiny_audio import AUDIO, RATE, WAVEFORM, save_tiny_audio

LENGTHS = (321, 480, 481, 5000, 7999, 8000, 15999, 16000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_audio(tmp_path_factory.mktemp("audio"))


def drawn(samples: int) -> np.ndarray:
    return np.random.default_rng(samples).uniform(-1, 1, samples).astype(np.float32)


@pytest.mark.parametrize("samples", LENGTHS)
def test_tokens_and_frames_are_those_of_transformers(folder: Path, samples: int) -> None:
    theirs = Qwen2AudioProcessor(
        WhisperFeatureExtractor.from_pretrained(folder),
        PreTrainedTokenizerFast.from_pretrained(folder),
    )
    waveform = drawn(samples)
    made = theirs(text=f"a{WAVEFORM}b", audio=[waveform], sampling_rate=RATE, return_tensors="pt")
    ours = AudioProcessor(folder)
    content = wav_of(waveform, RATE)
    assert ours.samples_of(content, "a") == samples
    frames = ours.frames_of(samples)
    assert frames == int(made["feature_attention_mask"].sum())
    assert ours.tokens_of(frames) == int((made["input_ids"] == AUDIO).sum()) > 0
    assert torch.equal(ours.frames(content), made["input_features"][0])
    assert (ours.placeholder, ours.positions) == (AUDIO, 50)


def test_what_is_too_short_for_a_feature_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"a has 320 samples, and the model needs 321"):
        AudioProcessor(folder).samples_of(wav_of(drawn(320), RATE), "a")


def test_what_lasts_longer_than_the_window_is_refused_and_not_cut(folder: Path) -> None:
    with pytest.raises(DataError, match=r"lasts 1\.0 s, and the model hears 1 s at most"):
        AudioProcessor(folder).frames(wav_of(drawn(16001), RATE))


def test_frames_are_kept_up_to_a_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = AudioProcessor(folder)
    contents = [wav_of(drawn(samples), RATE) for samples in (400, 500, 600)]
    digest = digest_of(contents[0])
    first = ours.frames(contents[0])
    assert ours.frames("gone.wav", digest) is first
    monkeypatch.setattr(cache, "MOST", 2 * first.nbytes)
    ours.frames(contents[1])
    ours.frames(contents[0])  # was asked for last
    ours.frames(contents[2])
    assert ours.frames(contents[0]) is first
    ours.frames(contents[1])
    ours.frames(contents[2])
    assert ours.frames(contents[0]) is not first
    assert torch.equal(ours.frames(contents[0]), first)


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("preprocessor_config.json", {"feature_size": 8}, "feature_size=8, but config.json says"),
        ("preprocessor_config.json", {"chunk_length": 2}, r"=100, but .*max_source_positions=50"),
        ("preprocessor_config.json", {"dither": 0.1}, "dither=0.1 adds noise"),
        ("preprocessor_config.json", {"padding_side": "left"}, "padding_side='left'"),
        ("preprocessor_config.json", {"hop_length": "far"}, "can't be used"),
        ("config.json", {"audio_token_index": "5"}, "audio_token_index='5' is no token's id"),
    ],
)
def test_a_folder_whose_waveforms_its_model_can_t_be_fed_is_refused(
    folder: Path, tmp_path: Path, file: str, fields: dict[str, Any], said: str
) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        content = json.loads((folder / name).read_text())
        (tmp_path / name).write_text(json.dumps(content | (fields if name == file else {})))
    with pytest.raises(CheckpointError, match=said):
        AudioProcessor(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no preprocessor_config\.json"):
        AudioProcessor(tmp_path)


def placed(digest: str, start: int, tokens: int) -> PlacedWaveform:
    return PlacedWaveform(
        b"inside", digest, frames=4 * tokens, positions=50, start=start, tokens=tokens
    )


ROWS = RowImages.of([(placed("a", 1, 2), placed("b", 4, 3)), (), (placed("b", 0, 3),)])


def test_a_waveform_of_several_rows_is_loaded_once_and_stands_in_all_of_them() -> None:
    loaded: list[str] = []

    def load(waveform: PlacedWaveform) -> torch.Tensor:
        loaded.append(waveform.digest)
        return torch.full((3, 100), float(len(loaded)))

    fed = waveform_tensors(ROWS, 3, 8, load=load)
    assert loaded == ["a", "b"]
    # the tower gives 25 rows for each
    assert fed.features.tolist() == [
        [0, 1, 2, 0, 26, 27, 28, 0], [0] * 8, [26, 27, 28, 0, 0, 0, 0, 0],
    ]  # fmt: skip
    assert fed.inputs["lengths"].tolist() == [8, 12]
    assert fed.inputs["frames"][:, 0, 0].tolist() == [1.0, 2.0]
    assert waveform_tensors(None, 1, 2, load=load).inputs == {}
    assert waveform_tensors(ROWS, 3, 8, load=None).inputs == {}


def test_waveforms_cost_their_whole_window_and_survive_a_journal() -> None:
    assert ROWS is not None
    assert ROWS.patches == [100, 0, 50]
    state = ROWS.state()
    assert RowImages.from_state(state) == ROWS
    assert RowImages.from_state(state).rows[0][0].source == b"inside"
    assert unexpanded([7, 5, 5, 8, 5, 5, 5, 9], ROWS.rows[0]) == [7, 5, 8, 5, 9]
