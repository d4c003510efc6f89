"""MediaReader: reads the images, videos and waveforms of records for prompts of a model with a vision
or audio encoder.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from rftmega.config import DataConfig, RunConfig
from rftmega.core.errors import DataError
from rftmega.core.media_positions import Placed
from rftmega.data.chat.media_parts import with_media_moved
from rftmega.data.media.audio_processor import AudioProcessor, audio_processor_of
from rftmega.data.media.image_processor import ImageProcessor, processor_of
from rftmega.data.prompt_images import ImageReader, Most
from rftmega.data.records import Record, records
from rftmega.data.tokenizer import Tokenizer
from rftmega.data.waveforms import WaveformReader


class MediaReader(Protocol):
    """MediaReader is the interface of readers that find the media of records and insert
    placeholders for their features into the prompts' token ids.
    """

    def fetch(self, records: Iterable[Record]) -> None: ...
    def sources(self, record: Record) -> Any: ...
    def marked(self, text: Any) -> Any: ...
    def placed(
        self, ids: Sequence[int], sources: Any, *, first: bool = False
    ) -> tuple[tuple[int, ...], tuple[Placed, ...]]: ...


@dataclass(frozen=True)
class MediaOptions:
    """MediaOptions says which media the prompts of a run may have."""

    processor: ImageProcessor | AudioProcessor | None = None  # None: a text model
    max_images: int = 0  # per prompt; of an audio-language model, waveforms
    max_videos: int = 0

    @staticmethod
    def of(config: RunConfig) -> "MediaOptions":
        """Returns the options of a run, with the processor of its model's folder."""
        path, chosen = config.model.path, config.rollout
        processor = audio_processor_of(path) or processor_of(path)
        return MediaOptions(processor, chosen.max_images, chosen.max_videos)

    def reader(
        self, source: str | Path, tokenizer: Tokenizer, config: DataConfig, most: int | None = None
    ) -> MediaReader:
        """Returns a reader for the records of `source`, and downloads the media that its first
        `most` records (None: all) name by URL.
        """
        reader: MediaReader
        if isinstance(self.processor, AudioProcessor):
            reader = WaveformReader(self.processor, config, source, self.max_images)
        else:
            media = Most(self.max_images, self.max_videos)
            reader = ImageReader(self.processor, config, source, media, tokenizer)
        if config.media_hosts and self.processor is not None:
            given = (
                each for _, each in islice(records(source), most) if not isinstance(each, DataError)
            )
            reader.fetch(with_media_moved(given, config))
        return reader

    def placeholders(self, tokenizer: Tokenizer) -> list[str]:
        """Returns the names of the control tokens by which a prompt marks the positions of its
        media; an empty list for a text model.
        """
        if self.processor is None:
            return []
        processor = self.processor
        video = "" if isinstance(processor, AudioProcessor) else processor.video_text
        return tokenizer.control.found([processor.text, video])


TEXT_ONLY = MediaOptions()
