"""Rows with waveforms, laid out by transformers' own feature extractor, for tests of models that hear."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import WhisperFeatureExtractor

from rftmega.core.media_positions import RowImages
from rftmega.core.types import Rows
from rftmega.core.waveform_positions import PlacedWaveform
from rftmega.data.media.waveforms import wav_of
from tests.layouts import rows_of
from tests.tiny_audio import AUDIO, AUDIO_END, AUDIO_START, RATE, waveforms

# words, and waveforms by their number: two, none, one at the very beginning, one that another row
# has, and a prompt of the same again
ROWS: tuple[tuple[str | int, ...], ...] = (
    ("ab", 0, "c", 1, "defghijklmnop"),
    ("no sound here at all",),
    (2, "qr?stuvwxyz"),
    ("x", 1, "yz 0123"),
    ("A",),
    (0, 1, 2, "!BCDEFG"),
)


def audio_rows(folder: Path) -> tuple[list[list[int]], list[tuple[PlacedWaveform, ...]]]:
    """Returns token ids and waveforms of ROWS; their frames are transformers'."""
    extract = WhisperFeatureExtractor.from_pretrained(folder)
    heard = waveforms()
    made = [
        extract(wave, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
        for wave in heard
    ]
    tokens: list[list[int]] = []
    placed: list[tuple[PlacedWaveform, ...]] = []
    for row in ROWS:
        ids: list[int] = []
        own: list[PlacedWaveform] = []
        for part in row:
            if isinstance(part, str):
                ids += [ord(letter) - 25 for letter in part]
                continue
            frames = made[part]["input_features"][0]
            length = int(made[part]["attention_mask"].sum())
            size = ((length - 1) // 2 + 1 - 2) // 2 + 1
            ids.append(AUDIO_START)
            digest = hashlib.sha256(wav_of(heard[part], RATE)).hexdigest()
            own.append(PlacedWaveform(frames, digest, length, frames.shape[1] // 2, len(ids), size))
            ids += [AUDIO] * size + [AUDIO_END]
        tokens.append(ids)
        placed.append(tuple(own))
    return tokens, placed


def prompts_of(tokens: list[list[int]]) -> list[int]:
    """Returns the lengths of prompts: one token behind the last waveform, or a few words."""
    found = []
    for ids in tokens:
        ends = [place for place, token in enumerate(ids) if token == AUDIO_END]
        found.append(ends[-1] + 2 if ends else min(3, max(len(ids) // 2, 1)))
    return found


def rows_with_waveforms(folder: Path) -> Rows:
    tokens, placed = audio_rows(folder)
    rows = rows_of(tokens, prompts_of(tokens))
    return Rows(rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask, RowImages.of(placed))


def with_files(folder: Path, placed: tuple[PlacedWaveform, ...]) -> tuple[PlacedWaveform, ...]:
    """Returns the waveforms with a file of each in place of its frames."""
    found = []
    contents = [wav_of(wave, RATE) for wave in waveforms()]
    for waveform in placed:
        (content,) = [
            each for each in contents if hashlib.sha256(each).hexdigest() == waveform.digest
        ]
        path = folder / f"{waveform.digest}.wav"
        if not path.is_file():
            draft = folder / f"{waveform.digest}.{os.getpid()}"
            draft.write_bytes(content)
            draft.rename(path)
        found.append(replace(waveform, source=str(path)))
    return tuple(found)


def inputs_of(ids: list[int], own: tuple[PlacedWaveform, ...]) -> dict[str, Any]:
    """Returns what transformers' model is given of one row."""
    given: dict[str, Any] = {"input_ids": torch.tensor([ids])}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    if own:
        frames = torch.stack([torch.as_tensor(each.source) for each in own])
        lengths = torch.tensor([each.frames for each in own])
        heard = torch.arange(frames.shape[-1]) < lengths[:, None]
        given |= {"input_features": frames, "feature_attention_mask": heard.long()}
    return given


def transformers_log_probs(
    model: Any, tokens: list[list[int]], placed: list[tuple[PlacedWaveform, ...]]
) -> list[torch.Tensor]:
    """Returns [length - 1] of each row, one row at a time."""
    found = []
    for ids, own in zip(tokens, placed, strict=True):
        logp = model(**inputs_of(ids, own)).logits[0].log_softmax(-1)
        targets = torch.tensor(ids[1:], dtype=torch.int64)
        found.append(logp[:-1].gather(-1, targets[:, None])[:, 0])
    return found
