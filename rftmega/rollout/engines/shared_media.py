"""Passes decoded images and videos to vLLM servers of this host through shared memory.

A request contains only the location of the pixels, so all requests of a group share one copy.
"""

import json
import math
from asyncio import shield, wrap_future
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np

from rftmega.core.media_positions import PlacedImage, images_of
from rftmega.rollout.engines.image_prompts import decoded_source
from rftmega.rollout.requests import Request
from rftmega.runtime.parallel import shared

THREADS = 4  # for decoding


class SharedPixels(NamedTuple):
    """SharedPixels is the location in shared memory of the pixels of an image [H, W, 3] or a video
    [F, H, W, 3]: the name of the memory and the shape.
    """

    memory: str
    shape: tuple[int, ...]
    metadata: dict[str, Any] | None  # of a video

    def told(self) -> str:
        return json.dumps(self._asdict())

    @staticmethod
    def heard(said: str) -> "SharedPixels":
        """Parses `said`, the JSON that `told` returned for a location. Raises ValueError for any
        other text.
        """
        try:
            found = json.loads(said)
            memory, shape = found["memory"], tuple(map(int, found["shape"]))
            return SharedPixels(memory, shape, found["metadata"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{said[:80]!r} names no pixels of ours") from error

    def read(self) -> np.ndarray:
        """Returns a copy of the pixels (uint8). Raises ValueError if the memory was not created by
        the trainer (`shared.attach`).
        """
        mapped = shared.attach(self.memory, math.prod(self.shape))
        return np.frombuffer(mapped, dtype=np.uint8).reshape(self.shape).copy()


class SharedMedia:
    """SharedMedia holds one decoded copy in shared memory of each image and video that a running
    request uses.
    """

    def __init__(self) -> None:
        self._held: dict[str, Future[SharedPixels]] = {}
        self._users: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(THREADS)

    @asynccontextmanager
    async def shown(self, request: Request) -> AsyncIterator[list[dict[str, str]]]:
        """Context manager that writes the request's images and videos to shared memory and yields
        the `content_parts` of a request to vLLM's `/inference/v1/generate`, which name their
        locations. The memory is freed at the end of the block, unless another running request uses
        it.

        Raises DataError for a file that can't be read any more, EngineError for an image that is
        given only as patches.
        """
        images = images_of(request.images)
        for image in images:
            self._take(image)
        try:
            parts = []
            for image in images:
                # shielded: other requests may wait for the same future
                pixels = await shield(wrap_future(self._held[image.digest]))
                kind = "image_url" if image.frames is None else "video_url"
                parts.append({"type": kind, "url": pixels.told(), "uuid": image.digest})
            yield parts
        finally:
            for image in images:
                self._leave(image.digest)

    def _take(self, image: PlacedImage) -> None:
        digest = image.digest
        self._users[digest] = self._users.get(digest, 0) + 1
        if digest not in self._held:
            self._held[digest] = self._threads.submit(_written, image)

    def _leave(self, digest: str) -> None:
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest]
            self._held.pop(digest).add_done_callback(_closed)

    def close(self) -> None:
        self._threads.shutdown()


def _written(image: PlacedImage) -> SharedPixels:
    content = decoded_source(image)
    frames, metadata = (content, None) if image.frames is None else content
    pixels = np.asarray(frames)
    memory = shared.create(pixels.nbytes)
    try:
        mapped = shared.attach(memory, pixels.nbytes)
        np.frombuffer(mapped, dtype=np.uint8)[:] = pixels.reshape(-1)
    except BaseException:
        shared.close(memory)
        raise
    return SharedPixels(memory, pixels.shape, metadata)


def _closed(written: "Future[SharedPixels]") -> None:
    if not written.cancelled() and written.exception() is None:
        shared.close(written.result().memory)
