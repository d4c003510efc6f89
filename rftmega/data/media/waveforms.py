"""Reading of waveforms from untrusted files, with limits on their length."""

import io
from typing import Any, Literal

import numpy as np

from rftmega.core.errors import DataError
from rftmega.data.media.files import content_of

FORMATS = ("WAV", "WAVEX", "FLAC")  # libsndfile's names
RIFF_HEAD = 12  # bytes before its first chunk
UNTOLD = 2**62  # samples: libsndfile's value for an unknown length
CONVERT = "Convert it: ffmpeg -i IN -ac 1 -ar {rate} OUT.wav."


def samples_of(content: bytes, name: str, *, rate: int, most: int) -> int:
    """Returns the number of samples of the waveform in a file's bytes, without decoding the
    waveform.

    `name` identifies the file in error messages; `rate`: required sampling rate in Hz; `most`:
    maximum number of samples. Raises DataError as `waveform_of` does, except for damage after the
    file's header.
    """
    with _opened(content, name) as file:
        _check_head(file, name, rate=rate, most=most)
        return int(file.frames)


def read_waveform(source: str | bytes, digest: str = "", *, rate: int, most: int) -> np.ndarray:
    """Returns the waveform [samples] of a file, given as a path or as bytes, in float32 from -1 to
    1.

    `digest`: SHA-256 that the file must have; "" to skip the check. `rate` and the errors raised:
    as in `waveform_of`; `most`: maximum number of samples.
    """
    name = source if isinstance(source, str) else "a waveform in the data"
    return waveform_of(content_of(source, digest, "waveform"), name, rate=rate, most=most)


def waveform_of(content: bytes, name: str, *, rate: int, most: int) -> np.ndarray:
    """Returns the waveform [samples] in a file's bytes, in float32 from -1 to 1.

    `name` identifies the file in error messages. Raises DataError for a file that is truncated, is
    neither WAV nor FLAC, has a sampling rate other than `rate` (Hz), several channels, no samples,
    or more than `most` samples (checked before decoding).
    """
    with _opened(content, name) as file:
        _check_head(file, name, rate=rate, most=most)
        try:
            found: np.ndarray = file.read(frames=most + 1, dtype="float32")
        except Exception as error:  # a broken file makes decoders raise anything
            raise DataError(f"{name} is broken: {error}") from error
        told = file.frames
    if len(found) != told:
        raise DataError(f"{name} is broken: it has {len(found)} samples, and {told} by its head.")
    if not np.isfinite(found).all():
        raise DataError(f"{name} is broken: it has samples that are no numbers.")
    return found


def wav_of(waveform: np.ndarray, rate: int) -> bytes:
    """Returns the bytes of a WAV file (float32) of a waveform [samples] from -1 to 1; `rate` in Hz."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, waveform.astype(np.float32), rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def _opened(content: bytes, name: str) -> Any:
    import soundfile

    try:
        file = soundfile.SoundFile(io.BytesIO(content))
    except Exception as error:  # a broken file makes decoders raise anything
        raise DataError(f"{name} can't be read as a waveform (WAV or FLAC): {error}") from error
    if file.format not in FORMATS:
        file.close()
        raise DataError(f"{name} is {file.format}, and only WAV and FLAC are read. Convert it.")
    if file.format != "FLAC" and (missing := _cut_off(content)):
        file.close()
        raise DataError(f"{name} is broken: {missing} bytes are missing at its end.")
    return file


def _check_head(file: Any, name: str, *, rate: int, most: int) -> None:
    convert = CONVERT.format(rate=rate)
    if file.samplerate != rate:
        raise DataError(
            f"{name} has {file.samplerate:,} samples a second, and the model hears {rate:,}. {convert}"
        )
    if file.channels != 1:
        raise DataError(f"{name} has {file.channels} channels, and the model hears one. {convert}")
    if file.frames >= UNTOLD:
        raise DataError(f"{name} does not say in its head how long it is. {convert}")
    if not file.frames:
        raise DataError(f"{name} holds no sound.")
    if file.frames > most:
        raise DataError(
            f"{name} lasts {file.frames / rate:.1f} s, and the model hears {most / rate:g} s at most. Cut it into pieces."
        )


def _cut_off(content: bytes) -> int:
    """Returns the number of bytes of samples that are missing at the end of a WAV file, which
    libsndfile would ignore. A WAV chunk is a type (4 bytes), a length (4), the data, and a padding
    byte if the length is odd.
    """
    order: Literal["big", "little"] = "big" if content.startswith(b"RIFX") else "little"
    place = RIFF_HEAD
    while place + 8 <= len(content):
        kind = content[place : place + 4]
        length = int.from_bytes(content[place + 4 : place + 8], order)
        place += 8 + length
        if kind == b"data":
            return max(place - len(content), 0)
        place += length % 2
    return 0
