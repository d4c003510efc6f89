"""vLLM media connector that reads the pixels of images and videos from shared memory, where the
trainer's process on the same host has written them.
"""

import asyncio
from typing import Any

import numpy as np
from PIL import Image

from rftmega.rollout.engines.shared_media import SharedPixels


class SharedMediaConnector:
    """SharedMediaConnector replaces vLLM's media connector in a server: it reads decoded images and
    videos from shared memory, where the trainer wrote them, instead of from files or URLs.
    """

    def __init__(self, **given: Any):
        """Accepts the arguments of vLLM's connector (`given`) and ignores them."""

    async def fetch_image_async(self, image_url: str, **given: Any) -> Any:
        """Returns the image as a PIL image. `image_url`: JSON with its location in shared memory
        (`SharedPixels.told`); vLLM's other arguments (`given`) are ignored.
        """
        return await asyncio.to_thread(_image, image_url)

    async def fetch_video_async(
        self, video_url: str, **given: Any
    ) -> tuple[np.ndarray, dict[str, Any] | None]:
        """Returns the video's frames [F, H, W, 3] and the metadata that vLLM expects. `video_url`:
        JSON with its location in shared memory (`SharedPixels.told`); vLLM's other arguments
        (`given`) are ignored.
        """
        return await asyncio.to_thread(_video, video_url)


def _image(told: str) -> Any:
    return Image.fromarray(SharedPixels.heard(told).read())


def _video(told: str) -> tuple[np.ndarray, dict[str, Any] | None]:
    pixels = SharedPixels.heard(told)
    return pixels.read(), pixels.metadata
