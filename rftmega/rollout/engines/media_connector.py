"""Passes pixels from the trainer's process to a vLLM server through shared memory."""

import asyncio
from typing import Any

import numpy as np
from PIL import Image

from rftmega.rollout.engines.shared_media import SharedPixels


class SharedMediaConnector:
    """SharedMediaConnector replaces vLLM's media connector, which would read files or URLs."""

    def __init__(self, **given: Any):
        """Accepts and ignores the arguments of vLLM's connector."""

    async def fetch_image_async(self, image_url: str, **given: Any) -> Any:
        """Returns a PIL image."""
        return await asyncio.to_thread(_image, image_url)

    async def fetch_video_async(
        self, video_url: str, **given: Any
    ) -> tuple[np.ndarray, dict[str, Any] | None]:
        """Returns a video's frames and vLLM's metadata."""
        return await asyncio.to_thread(_video, video_url)


def _image(told: str) -> Any:
    return Image.fromarray(SharedPixels.heard(told).read())


def _video(told: str) -> tuple[np.ndarray, dict[str, Any] | None]:
    pixels = SharedPixels.heard(told)
    return pixels.read(), pixels.metadata
