"""Pictures of records: what a column may hold, and where they stand among a prompt's tokens."""

import base64
import binascii
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from rftmega.config import DataConfig, split_source
from rftmega.data.examples import TooLong
from rftmega.data.records import Record
from rftmega.errors import DataError
from rftmega.media.files import content_of, digest_of, picture_of, png_of, size_of
from rftmega.media.placed import PlacedPicture
from rftmega.media.processor import PictureProcessor
from rftmega.types import Prompt

MARK = "<image>"  # in a text, stands for a picture
SHOWN = 80  # characters of a value that an error quotes
FEW = 1000  # pictures that are checked without a bar
MOST_THREADS = 8  # that decode side by side; a large picture takes a gigabyte


class PictureReader:
    """PictureReader finds the pictures of records, and puts them among their prompts' tokens.

    Its methods raise DataError that says what is wrong with a record.
    """

    def __init__(
        self, processor: PictureProcessor | None, config: DataConfig, source: str | Path, most: int
    ):
        """`processor`: None for a model that sees nothing. `source`: the data's file, beside which
        pictures lie unless data.pictures_folder says where. `most`: pictures a prompt may have.
        """
        self.processor, self.config, self.most = processor, config, most
        path, _ = split_source(source)
        beside = path if path.is_dir() else path.parent
        self.folder = Path(config.pictures_folder or beside).resolve()
        self._sizes: dict[str, tuple[int, int]] = {}  # by digest

    def sources(self, record: Record) -> list[str | bytes]:
        """Returns the files, or their bytes, that a record names."""
        given = record.get(self.config.images_key)
        if given is None:
            return []
        values = given if isinstance(given, list | tuple) else [given]
        if values and self.processor is None:
            raise DataError(
                f'"{self.config.images_key}" names {len(values)} picture(s), and the model has no vision tower. Take a '
                "model that sees, or set data.images_key to a key that no record has."
            )
        if len(values) > self.most:
            raise DataError(
                f"a prompt with {len(values)} pictures: rollout.max_pictures is {self.most}. Raise it, or leave some out."
            )
        return [self._source(value) for value in values]

    def marked(self, text: Any) -> Any:
        """Returns a prompt with the model's own placeholder, or a part of its own in chat messages,
        for each MARK.
        """
        if isinstance(text, str):
            return text.replace(MARK, self.processor.text) if self.processor else text
        if not isinstance(text, list) or self.processor is None:
            return text
        return [_in_parts(message) for message in text]

    def placed(
        self, ids: Sequence[int], sources: Sequence[str | bytes]
    ) -> tuple[tuple[int, ...], tuple[PlacedPicture, ...]]:
        """Returns the token ids with as many placeholders as pictures have features, and the
        pictures.
        """
        if self.processor is None:
            return tuple(ids), ()
        placeholder = self.processor.placeholder
        if self.processor.of_video in ids:
            raise DataError(
                "the prompt has a place for a video, and only pictures are learnt from so far. Leave the record out."
            )
        found = list(ids).count(placeholder)
        if found != len(sources):
            raise DataError(
                f'the prompt has {found} place(s) for pictures and "{self.config.images_key}" names {len(sources)}. A place '
                f"is {MARK}, a part of a chat message of type image, or the model's own {self.processor.text}."
            )
        left = iter(sources)
        expanded: list[int] = []
        pictures: list[PlacedPicture] = []
        for token in ids:
            if token != placeholder:
                expanded.append(token)
                continue
            picture = self._picture(next(left), len(expanded))
            pictures.append(picture)
            expanded += [placeholder] * picture.tokens
        return tuple(expanded), tuple(pictures)

    def _picture(self, source: str | bytes, start: int) -> PlacedPicture:
        assert self.processor is not None
        content = content_of(source)
        digest = digest_of(content)
        if digest not in self._sizes:
            name = source if isinstance(source, str) else None
            self._sizes[digest] = size_of(content, name)
        grid = self.processor.grid_of(*self._sizes[digest])
        return PlacedPicture(source, digest, grid, start, self.processor.tokens_of(grid))

    def _source(self, value: Any) -> str | bytes:
        if isinstance(value, dict) and {"bytes", "path"} & value.keys():  # as `datasets` has it
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        if hasattr(value, "save") and hasattr(value, "convert"):  # PIL's, as `datasets` decodes it
            return png_of(value)
        if not isinstance(value, str) or not value:
            raise DataError(
                f'"{self.config.images_key}" holds {_shown(value)}: a picture is a path, bytes, or base64 as data:image/...'
            )
        if value.startswith("data:"):
            return _decoded(value)
        if "://" in value:
            raise DataError(
                f"{_shown(value)} is not fetched: nothing is downloaded while a run goes on. Download it, and give the path."
            )
        try:
            path = (self.folder / value).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a zero byte, links in a circle
            raise DataError(f"{_shown(value)} can't be a picture's path: {error}.") from error
        if not path.is_relative_to(self.folder):
            raise DataError(
                f"{value} leads out of {self.folder}, where the pictures are. Set data.pictures_folder to a folder that has "
                "all of them."
            )
        return str(path)


def check_pictures(
    prompts: Sequence[Prompt], places: Sequence[str], *, rank: int, ranks: int
) -> None:
    """Decodes this process's share of all distinct pictures once, so that a broken one is found at
    the start.

    `places`: where each prompt stands in its file. Raises DataError that lists the broken ones.
    """
    distinct: dict[str, tuple[str, PlacedPicture]] = {}
    for prompt, place in zip(prompts, places, strict=True):
        for picture in prompt.pictures:
            distinct.setdefault(picture.digest, (place, picture))
    mine = [found for _, found in sorted(distinct.items())][rank::ranks]
    threads = min(MOST_THREADS, max((os.cpu_count() or 1) // ranks, 1))
    with ThreadPoolExecutor(threads) as pool:
        checks = pool.map(lambda found: _problem(*found), mine)
        seen = tqdm(checks, "pictures", len(mine), disable=rank > 0 or len(mine) < FEW)
        problems = [said for said in seen if said is not None]
    if problems:
        raise DataError.first_of(problems)


def expanded_within(ids: Sequence[int], limit: int, pictures: int) -> None:
    """Raises TooLong where the prompt is over the limit."""
    if len(ids) > limit:
        raise TooLong(
            f"the prompt has {len(ids)} tokens with its {pictures} picture(s), rollout.max_prompt_tokens is {limit}. Raise it, "
            "make the pictures smaller, or set data.too_long=drop."
        )


def refuse_pictures(record: Record, config: DataConfig) -> None:
    """Raises DataError for a record of given answers that names pictures."""
    if record.get(config.images_key):
        raise DataError(
            f'"{config.images_key}" names pictures, and given answers are learnt from words alone so far. Leave the record '
            "out, or set data.images_key to a key that no record has."
        )


def without_pictures(record: Record, config: DataConfig) -> Record:
    """Returns a record without what is inside its pictures; their paths stay."""
    given = record.get(config.images_key)
    if given is None:
        return record
    values = given if isinstance(given, list | tuple) else [given]
    names = []
    for value in values:
        path = value.get("path") if isinstance(value, dict) else value
        inside = not isinstance(path, str) or path.startswith("data:")
        names.append("" if inside else path)
    return {**record, config.images_key: names}


def _problem(place: str, picture: PlacedPicture) -> str | None:
    source = picture.source
    assert not isinstance(source, Tensor)
    name = source if isinstance(source, str) else "a picture in the data"
    try:
        content = content_of(source, picture.digest)
        told, found = size_of(content, name), picture_of(content, name).size
    except DataError as error:
        return f"{place}: {error}"
    if told != found:
        return f"{place}: {name} has {found} pixels, and {told} by its head. Save it anew."
    return None


def _in_parts(message: Any) -> Any:
    """Returns a chat message with a part for each MARK in its text."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str) or MARK not in content:
        return message
    parts: list[dict[str, str]] = []
    for place, text in enumerate(content.split(MARK)):
        if place:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def _decoded(text: str) -> bytes:
    head, _, content = text.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise DataError(f"{_shown(text)} is no picture: data:image/png;base64,... is.")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise DataError(f"{_shown(text)} is no base64: {error}.") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
