"""Waveforms of files that anybody may have made: what is read of them, and what is refused."""

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from rftmega.core.errors import DataError
from rftmega.data.media.files import digest_of
from rftmega.data.media.waveforms import read_waveform, samples_of, wav_of, waveform_of

RATE, MOST = 16000, 1000
LIMITS: dict[str, Any] = {"rate": RATE, "most": MOST}
LEVELS = np.random.default_rng(0).integers(-32768, 32768, 300, dtype=np.int16)


def by_hand(levels: np.ndarray, *, rate: int = RATE, channels: int = 1) -> bytes:
    """A WAV of 16 bits, as Python's own module writes it."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(levels.astype("<i2").tobytes())
    return file.getvalue()


def written(levels: np.ndarray, kind: str, subtype: str | None = None, **how: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, levels, RATE, format=kind, subtype=subtype, **how)
    return file.getvalue()


def test_samples_are_their_levels_over_the_largest(tmp_path: Path) -> None:
    wanted = LEVELS / 32768
    for content in (
        by_hand(LEVELS),
        written(LEVELS, "FLAC"),
        written(LEVELS, "WAV", "PCM_24"),
        BIG_ENDIAN,
    ):
        found = waveform_of(content, "a", **LIMITS)
        assert found.dtype == np.float32
        assert np.array_equal(found, wanted)
        assert samples_of(content, "a", **LIMITS) == 300
    (tmp_path / "a.wav").write_bytes(by_hand(LEVELS))
    assert np.array_equal(read_waveform(str(tmp_path / "a.wav"), **LIMITS), wanted)


def test_a_waveform_becomes_a_file_and_itself_again() -> None:
    drawn = np.random.default_rng(1).uniform(-1, 1, 500).astype(np.float32)
    assert np.array_equal(waveform_of(wav_of(drawn, RATE), "a", **LIMITS), drawn)


def test_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(by_hand(LEVELS))
    digest = digest_of(path.read_bytes())
    read_waveform(str(path), digest, **LIMITS)
    path.write_bytes(by_hand(LEVELS[::-1]))
    with pytest.raises(DataError, match=r"has changed .* Leave waveforms as they are"):
        read_waveform(str(path), digest, **LIMITS)


PLAIN, FLAC = by_hand(LEVELS), written(LEVELS, "FLAC")
# total samples: 36 bits of a FLAC's first block
UNTOLD = FLAC[:21] + bytes([FLAC[21] & 0xF0]) + bytes(4) + FLAC[26:]
PROMISING = FLAC[:22] + (400).to_bytes(4, "big") + FLAC[26:]  # it has 300
BIG_ENDIAN = written(LEVELS, "WAV", endian="BIG")
NO_NUMBER = wav_of(np.array([0.0, np.nan]), RATE)
REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "words": (b"once upon a time " * 9, r"can't be read as a waveform \(WAV or FLAC\)"),
    "another format": (written(LEVELS, "AIFF"), "is AIFF, and only WAV and FLAC are read"),
    "no samples": (by_hand(LEVELS[:0]), "holds no sound"),
    "another rate": (
        by_hand(LEVELS, rate=44100),
        "has 44,100 samples a second, and the model hears 16,000. Convert it: ffmpeg",
    ),
    "stereo": (by_hand(LEVELS, channels=2), "has 2 channels, and the model hears one"),
    "too long": (by_hand(np.zeros(1001)), r"lasts 0\.1 s, and the model hears 0\.0625 s at most"),
    "a WAV that is cut off": (PLAIN[:-7], "is broken: 7 bytes are missing at its end"),
    "a FLAC that is cut off": (FLAC[: len(FLAC) // 2], "broken"),
    "a FLAC with other bytes": (FLAC[:200] + bytes(50) + FLAC[250:], "broken"),
    "a FLAC that does not say how long it is": (UNTOLD, "does not say in its head how long it is"),
    "a WAV of large ends that is cut off": (BIG_ENDIAN[:-7], "7 bytes are missing at its end"),
    "a FLAC that promises more": (PROMISING, "is broken"),
    "a head alone": (PLAIN[:30], "can't be read|broken"),
    "no numbers": (NO_NUMBER, "samples that are no numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_t_be_heard_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    content, said = REFUSED[name]
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_waveform(str(tmp_path / "a.wav"), **LIMITS)


def test_a_long_waveform_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = by_hand(np.zeros(MOST + 1))
    monkeypatch.setattr(soundfile.SoundFile, "read", None)
    with pytest.raises(DataError, match="Cut it into pieces"):
        waveform_of(content, "a", **LIMITS)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't be read: No such file"):
        read_waveform(str(tmp_path / "none.wav"), **LIMITS)
    with pytest.raises(DataError, match=r"is no file. Give a waveform's file"):
        read_waveform(str(tmp_path), **LIMITS)
