"""Waveforms of records: accepted column values, and their positions among a prompt's tokens."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rftmega.config import DataConfig
from rftmega.core.errors import DataError, shown
from rftmega.core.waveform_positions import PlacedWaveform
from rftmega.data.fetched_files import Fetched
from rftmega.data.media.audio_processor import AudioProcessor
from rftmega.data.media.files import content_of, digest_of
from rftmega.data.prompt_images import in_parts
from rftmega.data.records import Record, listed
from rftmega.data.sources import addresses, decoded, folder_of, path_in

MARK = "<audio>"  # placeholder of a waveform in a text


class WaveformReader:
    """WaveformReader reads the waveforms of records, and inserts placeholders for their features
    into the prompts' token ids.

    Its methods raise DataError for invalid values of a record.
    """

    def __init__(
        self, processor: AudioProcessor, config: DataConfig, source: str | Path, most: int
    ):
        """`source`: the data file; paths of waveforms are relative to its folder unless
        data.media_folder is set. `most`: maximum number of waveforms per prompt.
        """
        self.processor, self.config, self.most = processor, config, most
        self.folder = folder_of(source, config)
        self.fetched = Fetched(self.folder, config.media_hosts)
        self._samples: dict[str, int] = {}  # by digest

    def sources(self, record: Record) -> list[str | bytes]:
        """Returns the path or the bytes of each waveform in a record."""
        for option, noun in (("images_key", "image"), ("videos_key", "video")):
            key = getattr(self.config, option)
            if seen := listed(record, key):
                raise DataError(
                    f'"{key}" names {len(seen)} {noun}(s), and the model hears and does not see. Take a model that sees, or set '
                    f"data.{option} to a key that no record has."
                )
        values = listed(record, self.config.audio_key)
        if len(values) > self.most:
            raise DataError(
                f"a prompt with {len(values)} waveforms: rollout.max_images is {self.most}. Raise it, or leave some out."
            )
        return [self._source(value) for value in values]

    def fetch(self, records: Iterable[Record]) -> None:
        """Downloads the waveforms that records name by URL, several at a time."""
        self.fetched.ahead(addresses(records, (self.config.audio_key,)))

    def marked(self, text: Any) -> Any:
        """Returns the prompt `text` (a string or chat messages) with each MARK replaced by the
        model's placeholder in a string, or by a separate message part in chat messages.
        """
        if isinstance(text, str):
            return text.replace(MARK, self.processor.text)
        if not isinstance(text, list):
            return text
        return [in_parts(message, {MARK: "audio"}) for message in text]

    def placed(
        self, ids: Sequence[int], sources: Sequence[str | bytes], *, first: bool = False
    ) -> tuple[tuple[int, ...], tuple[PlacedWaveform, ...]]:
        """Replaces each placeholder token in a prompt's `ids` by one placeholder per feature of its
        waveform. Returns the new token ids, and the waveforms with their positions in them.
        `sources`: path or bytes of each waveform. `first`: the ids are the beginning of a
        conversation, which may have only the first of the `sources`.
        """
        placeholder = self.processor.placeholder
        found = list(ids).count(placeholder)
        if found > len(sources) or (found < len(sources) and not first):
            raise DataError(
                f'the prompt has {found} place(s) for waveforms and "{self.config.audio_key}" names {len(sources)}. A place is '
                f"{MARK}, a part of a chat message of type audio, or the model's own {self.processor.text}."
            )
        left = iter(sources)
        expanded: list[int] = []
        placed: list[PlacedWaveform] = []
        for token in ids:
            if token != placeholder:
                expanded.append(token)
                continue
            waveform = self._waveform(next(left), len(expanded))
            placed.append(waveform)
            expanded += [placeholder] * waveform.tokens
        return tuple(expanded), tuple(placed)

    def _waveform(self, source: str | bytes, start: int) -> PlacedWaveform:
        content = content_of(source, noun="waveform")
        digest = digest_of(content)
        if digest not in self._samples:
            name = source if isinstance(source, str) else "a waveform in the data"
            self._samples[digest] = self.processor.samples_of(content, name)
        return self.processor.placed(source, digest, self._samples[digest], start)

    def _source(self, value: Any) -> str | bytes:
        if isinstance(value, dict) and {"bytes", "path"} & value.keys():  # the format of `datasets`
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        if not isinstance(value, str) or not value:
            raise DataError(
                f'"{self.config.audio_key}" holds {shown(value)}: a waveform is a path, bytes, or base64 as data:audio/...'
            )
        if value.startswith("data:"):
            return decoded(value, "audio", "waveform")
        return path_in(self.folder, value, "waveform", self.fetched)
