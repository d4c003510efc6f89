"""Moves images, videos and waveforms from the parts of chat messages to the columns of the record."""

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
PLACES = {"images_key": "image", "videos_key": "video", "audio_key": "audio"}  # placeholder types
INSIDE = ("url", "path", "bytes", "base64", "data")  # keys of the content


def media_moved(prompt: Any, record: Record, config: DataConfig) -> tuple[Any, Record]:
    """Returns (prompt, record): the prompt with its image, video and audio parts replaced by
    placeholder parts, and the record with the contents of these parts in the columns that
    data.images_key, videos_key and audio_key name.

    Raises DataError for an invalid part, and for a record that has media both in such a column and
    in its messages.
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
    """Raises DataError if `prompt`, messages or one message, has image, video or audio parts, which
    responses and preferences can't have.
    """
    for message in prompt if isinstance(prompt, list) else [prompt]:
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if (kind := _kind(part)) in KINDS:
                raise DataError(
                    f"a message has a part of the type {kind!r}, and responses and preferences are text alone so far. "
                    "Leave the record out."
                )


def with_media_moved(records: Iterable[Record], config: DataConfig) -> Iterator[Record]:
    """Yields each record after `media_moved` has moved its media from messages to columns. Yields a
    record unchanged if `media_moved` raises DataError.
    """
    for record in records:
        prompt = parsed(value_at(record, config.prompt_key))
        try:
            yield media_moved(prompt, record, config)[1]
        except DataError:  # reported with its position when the record is read
            yield record


def _place(part: Any, found: dict[str, list[Any]]) -> Any:
    """Returns the placeholder of a media part, and appends the part's content to `found[option]`,
    where `option` is the config option that names the column ("images_key" etc.). Returns other
    parts unchanged.
    """
    kind = _kind(part)
    if kind not in KINDS:
        return part
    option = KINDS[kind]
    place = {"type": PLACES[option]}
    held = _held(part, kind, PLACES[option])
    if held is None:
        return place
    found.setdefault(option, []).append(held)
    return place


def _kind(part: Any) -> str:
    """Returns the type of a part, "" for one without a type that is a text."""
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else ""


def _held(part: dict[str, Any], kind: str, noun: str) -> Any:
    """Returns the content of a media part: a path, URL, bytes, or a text that begins with data:;
    None if the part has no content. `kind`: the part's type; `noun`: "image", "video" or "audio".
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
    for name in ("base64", "data"):  # without the data: prefix, as in transformers and OpenAI
        text = inside.get(name)
        if isinstance(text, str):
            form = inside.get("format", "*")
            return text if text.startswith("data:") else f"data:{noun}/{form};base64,{text}"
    raise DataError(
        f"a part of the type {kind!r} holds {shown(given)}: url, path, bytes, base64 or data are read."
    )
