"""Images and videos of records: accepted column values, and their positions among a prompt's
tokens.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from tqdm import tqdm

from rftmega.config import DataConfig
from rftmega.core.errors import DataError, shown
from rftmega.core.media_positions import Placed, PlacedImage
from rftmega.core.waveform_positions import PlacedWaveform
from rftmega.data.examples import TooLong
from rftmega.data.fetched_files import Fetched
from rftmega.data.media.audio_processor import AudioProcessor
from rftmega.data.media.files import content_of, digest_of, image_of, png_of, size_of
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.data.media.videos import (
    Video,
    check_size,
    chosen_frames,
    digest_of_video,
    probed,
    read_video,
)
from rftmega.data.records import Record, listed
from rftmega.data.sources import addresses, decoded, folder_of, path_in
from rftmega.data.tokenizer import Tokenizer

MARK = "<image>"  # placeholder of an image in a text
VIDEO_MARK = "<video>"
MARKS = {MARK: "image", VIDEO_MARK: "video"}  # -> types of chat message parts
FEW = 1000  # images checked without a progress bar
MOST_THREADS = 8  # of concurrent decoding; a large image takes a gigabyte


@dataclass(frozen=True, slots=True)
class Most:
    """Most holds the maximum numbers of images and videos per prompt."""

    images: int
    videos: int


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources holds the media of a record: paths or bytes of its images, and paths (files or
    folders) of its videos.
    """

    images: list[str | bytes]
    videos: list[str]


class ImageReader:
    """ImageReader reads the images and videos of records, and inserts placeholders for their
    features into the prompts' token ids.

    Its methods raise DataError for invalid values of a record.
    """

    def __init__(
        self,
        processor: ImageProcessor | None,
        config: DataConfig,
        source: str | Path,
        most: Most,
        tokenizer: Tokenizer | None = None,
    ):
        """`processor`: None for a model without a vision encoder. `source`: the data file; paths of
        images are relative to its folder unless data.media_folder is set. `most`: maximum numbers
        of images and videos per prompt. `tokenizer` encodes the timestamps between the frames of a
        video.
        """
        self.processor, self.config, self.most = processor, config, most
        self.tokenizer = tokenizer
        self.folder = folder_of(source, config)
        self.fetched = Fetched(self.folder, config.media_hosts)
        self._sizes: dict[str, tuple[int, int]] = {}  # by digest
        self._videos: dict[str, tuple[Video, tuple[int, ...], str]] = {}  # by path

    def sources(self, record: Record) -> Sources:
        """Returns the images and videos of a record. Downloads media that are given by URL."""
        if heard := listed(record, self.config.audio_key):
            raise DataError(
                f'"{self.config.audio_key}" names {len(heard)} waveform(s), and the model has no tower that hears. Take a '
                "model that hears, or set data.audio_key to a key that no record has."
            )
        images = self._named(record, "images_key", "image", self.most.images)
        videos = self._named(record, "videos_key", "video", self.most.videos)
        return Sources([self._source(value) for value in images], [*map(self._video, videos)])

    def _named(self, record: Record, option: str, noun: str, most: int) -> list[Any]:
        key = getattr(self.config, option)
        values = listed(record, key)
        if values and self.processor is None:
            raise DataError(
                f'"{key}" names {len(values)} {noun}(s), and the model has no vision tower. Take a model that sees, or set '
                f"data.{option} to a key that no record has."
            )
        if len(values) > most:
            raise DataError(
                f"a prompt with {len(values)} {noun}s: rollout.max_{noun}s is {most}. Raise it, or leave some out."
            )
        return values

    def fetch(self, records: Iterable[Record]) -> None:
        """Downloads the images and videos that records name by URL to the media folder, several at a
        time; later reads find them there."""
        keys = self.config.images_key, self.config.videos_key
        self.fetched.ahead(addresses(records, keys))

    def marked(self, text: Any) -> Any:
        """Returns the prompt `text` (a string or chat messages) with each mark, <image> or <video>,
        replaced by the model's placeholder in a string, or by a separate message part in chat
        messages.

        <video>, which is also an HTML tag, is replaced only if prompts may have videos.
        """
        if self.processor is None:
            return text
        placeholders = {MARK: self.processor.text}
        if self.most.videos:
            placeholders[VIDEO_MARK] = self.processor.video_text
        if isinstance(text, str):
            for mark, placeholder in placeholders.items():
                text = text.replace(mark, placeholder)
            return text
        if not isinstance(text, list):
            return text
        marks = {mark: MARKS[mark] for mark in placeholders}
        return [in_parts(message, marks) for message in text]

    def placed(
        self, ids: Sequence[int], sources: Sources, *, first: bool = False
    ) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
        """Replaces each placeholder token in a prompt's `ids` by one placeholder per feature of its
        image or video. Returns the new token ids, and the images and videos with their positions in
        them. `first`: the ids are the beginning of a conversation, which may have only the first of
        the `sources`.
        """
        if self.processor is None:
            return tuple(ids), ()
        places = (
            (self.processor.placeholder, "images_key", "image", len(sources.images), MARK),
            (
                self.processor.video_placeholder,
                "videos_key",
                "video",
                len(sources.videos),
                VIDEO_MARK,
            ),
        )
        for placeholder, option, noun, given, mark in places:
            found = list(ids).count(placeholder)
            if found > given or (found < given and not first):
                text = self.processor.text if mark == MARK else self.processor.video_text
                raise DataError(
                    f'the prompt has {found} place(s) for {noun}s and "{getattr(self.config, option)}" names {given}. A place '
                    f"is {mark}, a part of a chat message of type {MARKS[mark]}, or the model's own {text}."
                )
        images, videos = iter(sources.images), iter(sources.videos)
        expanded: list[int] = []
        placed: list[PlacedImage] = []
        for token in ids:
            if token == self.processor.placeholder:
                image = self._image(next(images), len(expanded))
                placed.append(image)
                expanded += [token] * image.tokens
            elif token == self.processor.video_placeholder:
                tokens, video = self._placed_video(next(videos), len(expanded))
                placed.append(video)
                expanded += tokens
            else:
                expanded.append(token)
        return tuple(expanded), tuple(placed)

    def _image(self, source: str | bytes, start: int) -> PlacedImage:
        assert self.processor is not None
        content = content_of(source)
        digest = digest_of(content)
        if digest not in self._sizes:
            name = source if isinstance(source, str) else None
            self._sizes[digest] = size_of(content, name)
        grid = self.processor.grid_of(*self._sizes[digest])
        return PlacedImage(source, digest, grid, start, self.processor.tokens_of(grid))

    def _placed_video(self, path: str, start: int) -> tuple[list[int], PlacedImage]:
        assert self.processor is not None and self.tokenizer is not None
        if path not in self._videos:
            video = probed(path, self.config.video_fps)
            chosen = chosen_frames(video, self.config.video_fps, self.config.video_frames)
            check_size(path, video, chosen)
            self._videos[path] = (
                video,
                chosen,
                digest_of_video(path, video.total, video.rate, chosen),
            )
        video, chosen, digest = self._videos[path]
        grid = self.processor.video_grid_of(video, len(chosen))
        tokens, frames = self.processor.placed_video(
            grid, video, chosen, self.tokenizer.encode_reply
        )
        return tokens, PlacedImage(path, digest, grid, start, len(tokens), frames)

    def _video(self, value: Any) -> str:
        if isinstance(value, dict) and isinstance(value.get("path"), str):  # as in `datasets`
            value = value["path"]
        if not isinstance(value, str) or not value:
            raise DataError(
                f'"{self.config.videos_key}" holds {shown(value)}: a video is the path of a file, or of a folder that has its '
                "frames as images."
            )
        return path_in(self.folder, value, "video", self.fetched)

    def _source(self, value: Any) -> str | bytes:
        if isinstance(value, dict) and {"bytes", "path"} & value.keys():  # the format of `datasets`
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        if hasattr(value, "save") and hasattr(value, "convert"):  # PIL's, as `datasets` decodes it
            return png_of(value)
        if not isinstance(value, str) or not value:
            raise DataError(
                f'"{self.config.images_key}" holds {shown(value)}: an image is a path, bytes, or base64 as data:image/...'
            )
        if value.startswith("data:"):
            return decoded(value, "image", "image")
        return path_in(self.folder, value, "image", self.fetched)


class HasMedia(Protocol):
    """HasMedia is a prompt or an example with images, videos or waveforms."""

    @property
    def images(self) -> Sequence[Placed]: ...


def check_images(
    prompts: Sequence[HasMedia],
    places: Sequence[str],
    *,
    rank: int,
    ranks: int,
    audio_processor: AudioProcessor | None = None,
) -> None:
    """Decodes this process's share of all distinct images, videos and waveforms of the prompts
    once, to find broken files before the run starts.

    `places`: location of each prompt in its file. `rank`, `ranks`: index and number of the
    processes that share this work. `audio_processor`: None unless the model is an audio-language
    model. Raises DataError that lists the broken files.
    """
    distinct: dict[str, tuple[str, Placed]] = {}
    for prompt, place in zip(prompts, places, strict=True):
        for image in prompt.images:
            distinct.setdefault(image.digest, (place, image))
    mine = [found for _, found in sorted(distinct.items())][rank::ranks]
    threads = min(MOST_THREADS, max((os.cpu_count() or 1) // ranks, 1))
    with ThreadPoolExecutor(threads) as pool:
        checks = pool.map(lambda found: _problem(found[0], found[1], audio_processor), mine)
        seen = tqdm(checks, "images", len(mine), disable=rank > 0 or len(mine) < FEW)
        problems = [said for said in seen if said is not None]
    if problems:
        raise DataError.first_of(problems)


def expanded_within(ids: Sequence[int], limit: int, images: int) -> None:
    """Raises TooLong if a prompt has more than `limit` tokens. `ids`: its token ids, with one
    placeholder for each feature of its media; `images`: number of its media, for the error message.
    """
    if len(ids) > limit:
        raise TooLong(
            f"the prompt has {len(ids)} tokens with its {images} image(s), video(s) or waveform(s), rollout.max_prompt_tokens"
            f" is {limit}. Raise it, make them smaller or shorter, lower data.video_frames, or set data.too_long=drop."
        )


def _problem(place: str, image: Placed, audio_processor: AudioProcessor | None) -> str | None:
    source = image.source
    assert not isinstance(source, Tensor)
    name = source if isinstance(source, str) else "an image in the data"
    try:
        if isinstance(image, PlacedWaveform):
            assert audio_processor is not None, "no other model has waveforms"
            audio_processor.waveform(source, image.digest)
            return None
        if image.frames is not None:
            read_video(name, image.frames, image.digest)
            return None
        content = content_of(source, image.digest)
        told, found = size_of(content, name), image_of(content, name).size
    except DataError as error:
        return f"{place}: {error}"
    if told != found:
        return f"{place}: {name} has {found} pixels, and {told} by its head. Save it anew."
    return None


def in_parts(message: Any, marks: Mapping[str, str]) -> Any:
    """Returns a chat message whose text is split into parts at the marks; unchanged if its content
    is not a string or has no mark. `marks`: mark -> type of the part that replaces it.
    """
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str):
        return message
    pieces = re.split(f"({'|'.join(marks)})", content)
    if len(pieces) == 1:
        return message
    parts: list[dict[str, str]] = []
    for piece in pieces:
        if piece in marks:
            parts.append({"type": marks[piece]})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return {**message, "content": parts}
