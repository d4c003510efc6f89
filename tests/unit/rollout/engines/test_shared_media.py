"""Images for servers: in memory once while somebody shows them, and nothing else can be named."""

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rftmega.core.errors import DataError, EngineError
from rftmega.core.media_positions import PlacedImage
from rftmega.data.media.files import digest_of
from rftmega.rollout.engines.media_connector import SharedMediaConnector
from rftmega.rollout.engines.shared_media import SharedMedia, SharedPixels
from rftmega.rollout.requests import Request
from rftmega.runtime.parallel import shared


@pytest.fixture
def media() -> Any:
    made = SharedMedia()
    yield made
    made.close()


def saved(folder: Path, number: int) -> tuple[PlacedImage, np.ndarray]:
    """Returns an image that is a file, and its pixels."""
    pixels = np.random.default_rng(number).integers(0, 256, (30, 50, 3), dtype=np.uint8)
    path = folder / f"{number}.png"
    Image.fromarray(pixels).save(path)
    return PlacedImage(str(path), digest_of(path.read_bytes()), (1, 2, 2), 1, 1), pixels


def asking(*images: PlacedImage) -> Request:
    return Request([1, 2, 3], seed=0, images=images)


def open_memories() -> int:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(each) and "memfd:rftmega" in os.readlink(each) for each in links)


def test_what_is_shown_arrives_as_it_is_once_and_goes_with_the_last_who_shows_it(
    media: SharedMedia, tmp_path: Path
) -> None:
    (first, pixels), (second, others) = saved(tmp_path, 1), saved(tmp_path, 2)
    before = open_memories()

    async def siblings() -> list[str]:
        async with media.shown(asking(first, second)) as one:
            (tmp_path / "1.png").unlink()  # it is decoded already
            async with media.shown(asking(first)) as other:
                assert open_memories() == before + 2
                assert other == one[:1]
            assert open_memories() == before + 2, "it went with the first who showed it"
            assert [each["uuid"] for each in one] == [first.digest, second.digest]
            connector = SharedMediaConnector(allowed_local_media_path="", media_io_kwargs=None)
            found = [await connector.fetch_image_async(each["url"]) for each in one]
            assert np.array_equal(np.asarray(found[0]), pixels)
            assert np.array_equal(np.asarray(found[1]), others)
            return [each["url"] for each in one]

    urls = asyncio.run(siblings())
    assert open_memories() == before
    for url in urls:
        with pytest.raises(ValueError, match="can't be opened|other memory"):
            SharedPixels.heard(url).read()


def test_a_file_that_is_not_what_it_was_and_patches_are_refused_and_leave_nothing(
    media: SharedMedia, tmp_path: Path
) -> None:
    image, _ = saved(tmp_path, 3)
    other, _ = saved(tmp_path, 4)
    Path(str(image.source)).write_bytes(Path(str(other.source)).read_bytes())
    patches = PlacedImage(torch.zeros(4, 3), "patches", (1, 2, 2), 1, 1)
    before = open_memories()

    async def show(asked: PlacedImage) -> None:
        async with media.shown(asking(other, asked)):
            raise AssertionError

    with pytest.raises(DataError, match="has changed since the data were read"):
        asyncio.run(show(image))
    with pytest.raises(EngineError, match="Give the file, or its bytes"):
        asyncio.run(show(patches))
    assert open_memories() == before


def test_a_request_that_is_broken_off_leaves_nothing(media: SharedMedia, tmp_path: Path) -> None:
    image, _ = saved(tmp_path, 5)
    before = open_memories()

    async def broken_off() -> None:
        async def show() -> None:
            async with media.shown(asking(image)):
                await asyncio.sleep(60)

        task = asyncio.create_task(show())
        await asyncio.sleep(0)  # it waits for the pixels
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(broken_off())
    media.close()
    assert open_memories() == before


@pytest.mark.parametrize(
    "said",
    [
        "file:///etc/passwd",
        "http://127.0.0.1/image.png",
        "[]",
        '{"memory": "rftmega-1-1-0", "shape": [1], "metadata": null}',
        '{"memory": "/etc/passwd", "shape": [1], "metadata": null}',
        '{"shape": [1], "metadata": null}',
    ],
)
def test_a_server_opens_nothing_else(said: str) -> None:
    with pytest.raises(ValueError):
        asyncio.run(SharedMediaConnector().fetch_image_async(said))


def test_pixels_of_another_size_than_was_said_are_refused(tmp_path: Path) -> None:
    memory = shared.create(8)
    told = SharedPixels(memory, (3, 3), None).told()
    with pytest.raises(ValueError, match="of 9 bytes"):
        SharedPixels.heard(told).read()
    shared.close(memory)
