"""AudioProcessor converts waveforms into the inputs of an audio encoder."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftmega.core.errors import CheckpointError, DataError
from rftmega.core.json_files import read_json_object
from rftmega.core.waveform_positions import PlacedWaveform
from rftmega.data.media.cache import TensorCache
from rftmega.data.media.files import content_of, digest_of
from rftmega.data.media.image_processor import FILE, token_of
from rftmega.data.media.waveforms import read_waveform, samples_of

SHORTEST = 3  # frames that yield a feature


class AudioProcessor:
    """AudioProcessor computes spectral frames of 25 ms from waveforms, with the settings in the
    model's folder, and pads them to the audio encoder's window.
    """

    def __init__(self, folder: str | Path):
        """Raises CheckpointError if the folder has no valid audio settings."""
        folder = Path(folder)
        config = read_json_object(folder / "config.json")
        self._inner = _loaded(folder, config.get("audio_config") or {})
        name = "audio_token_index" if "audio_token_index" in config else "audio_token_id"
        self.placeholder = token_of(folder, config, name)
        # placeholder in a text, with its delimiters
        self.text = "<|audio_bos|><|AUDIO|><|audio_eos|>"
        self.rate: int = self._inner.sampling_rate
        self.most: int = self._inner.n_samples
        self.window: int = self._inner.nb_max_frames
        self._kept = TensorCache()
        self._read = partial(read_waveform, rate=self.rate, most=self.most)

    @property
    def positions(self) -> int:
        """Returns the sequence length of the audio encoder's layers: one position per two frames."""
        return self.window // 2

    def samples_of(self, content: bytes, name: str) -> int:
        """Returns the number of samples of the waveform in a file's bytes.

        Raises DataError for a waveform that the model can't process. `name` identifies the file in
        error messages.
        """
        samples = samples_of(content, name, rate=self.rate, most=self.most)
        if self.frames_of(samples) < SHORTEST:
            least = (SHORTEST - 1) * self._inner.hop_length + 1
            raise DataError(
                f"{name} has {samples} samples, and the model needs {least} to hear anything. Leave the record out."
            )
        return samples

    def frames_of(self, samples: int) -> int:
        """Returns the number of frames of a waveform with `samples` samples."""
        return -(-samples // int(self._inner.hop_length))

    def tokens_of(self, frames: int) -> int:
        """Returns the number of features, and thus of placeholder tokens, that the audio encoder
        computes from `frames` frames: about a fourth of `frames`.
        """
        return ((frames - 1) // 2 - 1) // 2 + 1

    def placed(self, source: str | bytes, digest: str, samples: int, start: int) -> PlacedWaveform:
        """Returns the PlacedWaveform (source and token positions) of a waveform with `samples`
        samples whose features begin at token `start` of a row. `source`: the file's path or bytes;
        `digest`: its SHA-256.
        """
        frames = self.frames_of(samples)
        return PlacedWaveform(source, digest, frames, self.positions, start, self.tokens_of(frames))

    def waveform(self, source: str | bytes, digest: str = "") -> np.ndarray:
        """Returns the samples of a waveform, given as a file's path or bytes. `digest`: as in
        `content_of`.

        Raises DataError if the file can't be read or has changed.
        """
        return self._read(source, digest)

    def frames(self, source: str | bytes | Tensor, digest: str = "") -> Tensor:
        """Returns the log-mel frames [M, window] of a waveform, given as a file's path or bytes, in
        float32; M is the number of mel bins, window the encoder's number of frames. Returns a
        tensor unchanged.

        Caches the frames of recent files by `digest`, their SHA-256, and does not read these files
        again. Raises DataError if the file can't be read or has changed.
        """
        if isinstance(source, Tensor):
            return source
        content = b""
        if digest not in self._kept:
            content = content_of(source, digest, "waveform")
            digest = digest or digest_of(content)
        if digest not in self._kept:
            self._kept.keep(digest, self.frames_in(self._read(content)))
        return self._kept[digest]

    def frames_in(self, waveform: np.ndarray) -> Tensor:
        """Returns the log-mel frames [M, window] of a waveform [samples], in float32; M is the
        number of mel bins, window the encoder's number of frames.
        """
        made = self._inner(
            waveform, sampling_rate=self.rate, padding="max_length", return_tensors="pt"
        )
        frames: Tensor = made["input_features"][0].to(torch.float32)
        return frames


def audio_processor_of(folder: str | Path) -> AudioProcessor | None:
    """Returns the processor of an audio-language model's folder; None if the folder has no
    config.json or the config no audio encoder.

    Raises CheckpointError if the folder of an audio-language model has no audio settings.
    """
    file = Path(folder) / "config.json"
    hears = file.is_file() and read_json_object(file).get("audio_config")
    return AudioProcessor(folder) if hears else None


def _loaded(folder: Path, tower: dict[str, Any]) -> Any:
    """Returns the feature extractor of transformers. Raises CheckpointError if its settings are
    missing or do not match the audio encoder's config.
    """
    from transformers import WhisperFeatureExtractor

    file = folder / FILE
    if not file.is_file():
        raise CheckpointError(
            f"{folder} holds no {FILE}, which says how its model is fed waveforms. Copy it from where the model is from."
        )
    read_json_object(file)
    try:
        found: Any = WhisperFeatureExtractor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of a field with an unexpected value
        raise CheckpointError(
            f"{file} can't be used: {type(error).__name__}: {error}. Copy it from where the model is from."
        ) from error
    if found.dither:
        raise CheckpointError(
            f"{file}: dither={found.dither} adds noise, another in the engine than in the trainer. Set it to 0."
        )
    if found.padding_side != "right":
        raise CheckpointError(
            f"{file}: padding_side={found.padding_side!r} is not supported, only 'right' is."
        )
    alike = (
        ("feature_size", found.feature_size, "num_mel_bins", tower.get("num_mel_bins")),
        (
            "chunk_length x sampling_rate / hop_length / 2",
            found.nb_max_frames / 2,
            "max_source_positions",
            tower.get("max_source_positions"),
        ),
    )
    for own, value, name, wanted in alike:
        if wanted != value:
            raise CheckpointError(
                f"{file}: {own}={value:g}, but config.json says audio_config.{name}={wanted}. They must be of one model."
            )
    return found
