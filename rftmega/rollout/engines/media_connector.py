"""Gives a vLLM server the pixels that the trainer's process put into shared memory."""

import asyncio
from typing import Any

import numpy as np
from PIL import Image

from rftmega.rollout.engines.shared_media import SharedPixels


class SharedMediaConnector:
    """SharedMediaConnector stands in the place of vLLM's, which would fetch what is on the disk or in
    the network.
    """

    def __init__(self, **given: Any):
        """Takes, and leaves, what vLLM's own is given."""

    async def fetch_image_async(self, image_url: str, **given: Any) -> Any:
        """Returns an image of PIL's."""
        return await asyncio.to_thread(_image, image_url)

    async def fetch_video_async(
        self, video_url: str, **given: Any
    ) -> tuple[np.ndarray, dict[str, Any] | None]:
        """Returns frames and what vLLM is told of them."""
        return await asyncio.to_thread(_video, video_url)


def _image(told: str) -> Any:
    return Image.fromarray(SharedPixels.heard(told).read())


def _video(told: str) -> tuple[np.ndarray, dict[str, Any] | None]:
    pixels = SharedPixels.heard(told)
    return pixels.read(), pixels.metadata
