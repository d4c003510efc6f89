"""PictureProcessor turns pictures and videos into what a vision tower is fed."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftmega.errors import CheckpointError, DataError
from rftmega.json_files import read_json_object
from rftmega.media.files import content_of, digest_of, read_picture
from rftmega.media.placed import Frames, PlacedPicture
from rftmega.media.videos import Video, read_frames

FILE = "preprocessor_config.json"
Encode = Callable[[str], Sequence[int]]
KEPT = 256 * 2**20  # bytes of patches that wait to be used again


class PictureProcessor:
    """PictureProcessor scales pictures and videos and cuts them into patches, as the model's folder
    says.

    torchvision does it, as in vLLM: another back-end gives other numbers.
    """

    def __init__(self, folder: str | Path):
        """Raises CheckpointError where the folder says nothing of pictures."""
        from transformers import AutoImageProcessor
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        folder = Path(folder)
        config = read_json_object(folder / "config.json")
        if not (folder / FILE).is_file():
            raise CheckpointError(
                f"{folder} holds no {FILE}, which says how its model is fed pictures. Copy it from where the model is from."
            )
        self._inner: Any = AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, backend="torchvision"
        )
        self._smart_resize = smart_resize
        self._folder, self._family = folder, config["model_type"]
        self._vision: dict[str, Any] = config["vision_config"]
        self.placeholder: int = config["image_token_id"]
        self.video_placeholder: int = config.get("video_token_id", -1)
        self.vision_start: int = config.get("vision_start_token_id", -1)
        self.vision_end: int = config.get("vision_end_token_id", -1)
        # as a text has it, with what stands around it
        self.text = "<|vision_start|><|image_pad|><|vision_end|>"
        self.video_text = "<|vision_start|><|video_pad|><|vision_end|>"
        self.merge: int = self._inner.merge_size
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._bytes = 0

    def grid_of(self, width: int, height: int) -> tuple[int, int, int]:
        """Returns how many patches along time (1), height and width a picture of so many pixels has.

        Raises DataError for one that is too narrow.
        """
        size = self._inner.size
        patch = self._inner.patch_size
        try:
            high, wide = self._smart_resize(
                height,
                width,
                factor=patch * self.merge,
                min_pixels=size["shortest_edge"],
                max_pixels=size["longest_edge"],
            )
        except ValueError as error:
            raise DataError(
                f"a picture of {width} x {height} pixels can't be used: {error}."
            ) from None
        return 1, high // patch, wide // patch

    def video_grid_of(self, video: Video, frames: int) -> tuple[int, int, int]:
        """Returns how many patches along time, height and width so many frames of a video have.

        Raises DataError for one that is too narrow.
        """
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        size = self._videos.size
        patch, deep = self._videos.patch_size, self._videos.temporal_patch_size
        limits = {
            "factor": patch * self._videos.merge_size,
            "min_pixels": size["shortest_edge"],
            "max_pixels": size["longest_edge"],
        }
        try:
            if type(self._videos).__name__ == "Qwen3VLVideoProcessor":  # bounds all frames together
                high, wide = smart_resize(
                    frames, video.height, video.width, temporal_factor=deep, **limits
                )
            else:
                high, wide = self._smart_resize(video.height, video.width, **limits)
        except ValueError as error:
            raise DataError(
                f"a video of {video.width} x {video.height} pixels can't be used: {error}."
            ) from None
        return -(-frames // deep), high // patch, wide // patch

    def placed_video(
        self, grid: tuple[int, int, int], video: Video, chosen: Sequence[int], encode: Encode
    ) -> tuple[list[int], Frames]:
        """Returns the tokens that stand in a video's place, and its frames; `encode` gives the
        tokens of a time, which Qwen3-VL is told in words before each run.
        """
        length = self.tokens_of(grid)
        deep: int = self._videos.temporal_patch_size
        if self._family != "qwen3_vl":
            step = 1.0
            if self._family == "qwen2_5_vl":
                seconds = deep * video.total / (len(chosen) * video.rate)
                # rounded as transformers' tensor is
                step = float(np.float32(seconds)) * self._vision.get("tokens_per_second", 4)
            frames = Frames(tuple(chosen), video.total, video.rate, step, (0,), length)
            return [self.video_placeholder] * length, frames
        ids: list[int] = []
        starts: list[int] = []
        each = length // grid[0]
        for time in range(grid[0]):
            first = chosen[time * deep] / video.rate
            last = chosen[min(time * deep + deep, len(chosen)) - 1] / video.rate
            ids += encode(f"<{(first + last) / 2:.1f} seconds>")
            ids.append(self.vision_start)
            starts.append(len(ids))
            ids += [self.video_placeholder] * each + [self.vision_end]
        return ids, Frames(tuple(chosen), video.total, video.rate, 1.0, tuple(starts), each)

    @cached_property
    def _videos(self) -> Any:
        """Returns what scales videos.

        Raises CheckpointError where it would scale them as `video_grid_of` does not know.
        """
        from transformers import AutoVideoProcessor

        found = AutoVideoProcessor.from_pretrained(
            self._folder, local_files_only=True, trust_remote_code=False
        )
        if found.cap_pixels_per_frame:
            raise CheckpointError(
                f"{self._folder} says cap_pixels_per_frame of videos, which is not honoured here. Set it to false."
            )
        return found

    def tokens_of(self, grid: tuple[int, int, int]) -> int:
        """Returns how many features a picture or video of these patches has."""
        time, height, width = grid
        return time * height * width // self.merge**2

    def pixels(self, source: str | bytes) -> Tensor:
        """Returns the patches [h * w, C] of a picture's file, or of its bytes; the last ones are kept.

        Raises DataError where it can't be read.
        """
        content = content_of(source)
        return self._once(digest_of(content), lambda: self.patches_of(read_picture(content)))

    def placed_pixels(self, picture: PlacedPicture) -> Tensor:
        """Returns the patches [t * h * w, C] of a picture or video of a prompt.

        Raises DataError where it can't be read any more.
        """
        source, frames = picture.source, picture.frames
        if isinstance(source, Tensor):
            return source
        if frames is None:
            return self.pixels(source)
        path = str(source)
        return self._once(
            picture.digest, lambda: self.video_patches_of(read_frames(path, frames.chosen))
        )

    def _once(self, digest: str, make: Callable[[], Tensor]) -> Tensor:
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        found = make()
        self._kept[digest] = found
        self._bytes += found.nbytes
        while self._bytes > KEPT and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes
        return found

    def patches_of(self, picture: Any) -> Tensor:
        """Returns the patches [h * w, C] of a picture of PIL's, in float32."""
        made = self._inner(images=[picture], return_tensors="pt")
        patches: Tensor = made["pixel_values"].to(torch.float32)
        return patches

    def video_patches_of(self, frames: np.ndarray) -> Tensor:
        """Returns the patches [t * h * w, C] of frames [T, height, width, 3], in float32."""
        made = self._videos(videos=[frames], do_sample_frames=False, return_tensors="pt")
        patches: Tensor = made["pixel_values_videos"].to(torch.float32)
        return patches


def processor_of(folder: str | Path) -> PictureProcessor | None:
    """Returns the processor of a model that sees; None for another.

    Raises CheckpointError where its folder says nothing of pictures.
    """
    config = read_json_object(Path(folder) / "config.json")
    return PictureProcessor(folder) if config.get("vision_config") else None
