"""Hands decoded pictures and videos to vLLM servers of this host, in memory that both map.

A request tells where they are. Nothing of them is in it, so a group's samples repeat nothing.
"""

import json
import math
from asyncio import shield, wrap_future
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np

from rftmega.core.media_positions import PlacedPicture, pictures_of
from rftmega.rollout.engines.images import decoded_source
from rftmega.rollout.requests import Request
from rftmega.runtime.parallel import shared

THREADS = 4  # that decode


class SharedPixels(NamedTuple):
    """SharedPixels tells where the pixels of a picture [H, W, 3] or of a video [F, H, W, 3] are."""

    memory: str
    shape: tuple[int, ...]
    metadata: dict[str, Any] | None  # of a video

    def told(self) -> str:
        return json.dumps(self._asdict())

    @staticmethod
    def heard(said: str) -> "SharedPixels":
        """Returns what `told` gave. Raises ValueError for anything else."""
        try:
            found = json.loads(said)
            memory, shape = found["memory"], tuple(map(int, found["shape"]))
            return SharedPixels(memory, shape, found["metadata"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{said[:80]!r} names no pixels of ours") from error

    def read(self) -> np.ndarray:
        """Returns a copy. Raises ValueError as `shared.attach` does."""
        mapped = shared.attach(self.memory, math.prod(self.shape))
        return np.frombuffer(mapped, dtype=np.uint8).reshape(self.shape).copy()


class SharedMedia:
    """SharedMedia holds what requests show, once each, while a request shows it."""

    def __init__(self) -> None:
        self._held: dict[str, Future[SharedPixels]] = {}
        self._users: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(THREADS)

    @asynccontextmanager
    async def shown(self, request: Request) -> AsyncIterator[list[dict[str, str]]]:
        """Gives `content_parts` of vLLM's `/inference/v1/generate`, which holds within the block.

        Raises DataError for a file that can't be read any more, EngineError for a picture that is
        there as patches alone.
        """
        pictures = pictures_of(request.pictures)
        for picture in pictures:
            self._take(picture)
        try:
            parts = []
            for picture in pictures:
                # another request waits for the same
                pixels = await shield(wrap_future(self._held[picture.digest]))
                kind = "image_url" if picture.frames is None else "video_url"
                parts.append({"type": kind, "url": pixels.told(), "uuid": picture.digest})
            yield parts
        finally:
            for picture in pictures:
                self._leave(picture.digest)

    def _take(self, picture: PlacedPicture) -> None:
        digest = picture.digest
        self._users[digest] = self._users.get(digest, 0) + 1
        if digest not in self._held:
            self._held[digest] = self._threads.submit(_written, picture)

    def _leave(self, digest: str) -> None:
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest]
            self._held.pop(digest).add_done_callback(_closed)

    def close(self) -> None:
        self._threads.shutdown()


def _written(picture: PlacedPicture) -> SharedPixels:
    content = decoded_source(picture)
    frames, metadata = (content, None) if picture.frames is None else content
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
