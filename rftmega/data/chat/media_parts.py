"""Finds images, videos and waveforms that parts of chat messages hold, and moves them to the
record's columns, where those of every other record are.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from rftmega.config import DataConfig
from rftmega.core.errors import DataError, shown
from rftmega.data.chat.messages import parsed
from rftmega.data.records import Record, listed, value_at, with_value

KINDS = {  # types of parts, as OpenAI, transformers and Qwen name them -> the option of the column
    "image": "images_key",
    "image_url": "images_key",
    "input_image": "images_key",
    "video": "videos_key",
    "video_url": "videos_key",
    "audio": "audio_key",
    "audio_url": "audio_key",
    "input_audio": "audio_key",
}
PLACES = {"images_key": "image", "videos_key": "video", "audio_key": "audio"}  # types of a place
INSIDE = ("url", "path", "bytes", "base64", "data")  # what a part says itself, or its object


def media_moved(prompt: Any, record: Record, config: DataConfig) -> tuple[Any, Record]:
    """Returns a prompt whose parts are places alone, and the record with what they held in the
    columns of data.images_key, videos_key and audio_key.

    Raises DataError for a record that has a column as well, and for a part that can't be read.
    """
    found: dict[str, list[Any]] = {}
    if not isinstance(prompt, list):
        return prompt, record
    messages = [
        {**message, "content": [_place(part, found) for part in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in prompt
    ]
    if not found:
        return messages, record
    for option, values in found.items():
        key = getattr(config, option)
        if listed(record, key):
            raise DataError(
                f'"{key}" names files and parts of the messages hold some. Put all of them in one of the two.'
            )
        record = {**record, key: values}
    return messages, with_value(record, config.prompt_key, messages)


def refuse_places(prompt: Any) -> None:
    """Raises DataError for messages with parts that are no text."""
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") in KINDS:
                raise DataError(
                    f"a message has a part of the type {part['type']!r}, and given answers are learnt from words alone so far. "
                    "Leave the record out."
                )


def with_media_moved(records: Iterable[Record], config: DataConfig) -> Iterator[Record]:
    """Yields records as `media_moved` makes them; those that it refuses as they are."""
    for record in records:
        prompt = parsed(value_at(record, config.prompt_key))
        try:
            yield media_moved(prompt, record, config)[1]
        except DataError:  # told with its place when the record is read
            yield record


def _place(part: Any, found: dict[str, list[Any]]) -> Any:
    """Returns the place of a part; what the part holds is added to `found`, by option."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in KINDS:
        return part
    option = KINDS[kind]
    place = {"type": PLACES[option]}
    held = _held(part, kind, PLACES[option])
    if held is None:
        return place
    found.setdefault(option, []).append(held)
    return place


def _held(part: dict[str, Any], kind: str, noun: str) -> Any:
    """Returns what a part holds: a path, an address, bytes, or text that begins with data:; None for
    a place without anything.
    """
    names = (kind, noun, f"{noun}_url")
    under = [part[name] for name in names if part.get(name) is not None]
    given = under[0] if under else {name: part[name] for name in INSIDE if part.get(name)}
    if isinstance(given, str):
        return given.removeprefix("file://")
    if not isinstance(given, dict):
        return given
    inside = {name: value for name, value in given.items() if value is not None}
    if not inside:
        return None
    for name in ("url", "path"):
        if isinstance(inside.get(name), str) and not inside.get("bytes"):
            return str(inside[name]).removeprefix("file://")
    if "bytes" in inside:
        return inside
    for name in ("base64", "data"):  # without its head, as transformers and OpenAI have it
        text = inside.get(name)
        if isinstance(text, str):
            form = inside.get("format", "*")
            return text if text.startswith("data:") else f"data:{noun}/{form};base64,{text}"
    raise DataError(
        f"a part of the type {kind!r} holds {shown(given)}: url, path, bytes, base64 or data are read."
    )
