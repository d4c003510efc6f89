"""ImageProcessor converts images and videos into the inputs of a vision encoder."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftmega.core.errors import CheckpointError, DataError
from rftmega.core.json_files import read_json_object
from rftmega.core.media_positions import Frames, PlacedImage
from rftmega.data.media.files import read_image
from rftmega.data.media.videos import Video, read_video

FILE = "preprocessor_config.json"
Encode = Callable[[str], Sequence[int]]
KEPT = 256 * 2**20  # bytes of cached patches
READERS = 4  # threads
AHEAD = 8  # images and videos that are read in advance
# fields of vision_config -> fields of FILE that must have the same value
ALIKE = {
    "patch_size": "patch_size",
    "spatial_merge_size": "merge_size",
    "temporal_patch_size": "temporal_patch_size",
}


class ImageProcessor:
    """ImageProcessor scales images and videos and cuts them into patches, with the settings in the
    model's folder.

    It uses torchvision, as vLLM does: other back-ends return other values.
    """

    def __init__(self, folder: str | Path):
        """Raises CheckpointError if the folder has no valid image settings."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        folder = Path(folder)
        config = read_json_object(folder / "config.json")
        self._inner = _loaded(folder, config.get("vision_config") or {})
        self._smart_resize = smart_resize
        self.placeholder = token_of(folder, config, "image_token_id")
        self.video_placeholder = token_of(folder, config, "video_token_id")
        self._folder, self._config = folder, config
        self.tells_times = str(config.get("model_type")).startswith(("qwen3_vl", "qwen3_5"))
        # placeholders in a text, with their delimiters
        self.text = "<|vision_start|><|image_pad|><|vision_end|>"
        self.video_text = "<|vision_start|><|video_pad|><|vision_end|>"
        self.merge: int = self._inner.merge_size
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._bytes = 0
        self._coming: deque[PlacedImage] = deque()
        self._reading: dict[str, Future[Tensor]] = {}  # by digest

    def grid_of(self, width: int, height: int) -> tuple[int, int, int]:
        """Returns the number of patches of an image along time (always 1), height and width.

        Raises DataError for an image that is too narrow to be scaled.
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
                f"an image of {width} x {height} pixels can't be used: {error}."
            ) from None
        return 1, high // patch, wide // patch

    def video_grid_of(self, video: Video, frames: int) -> tuple[int, int, int]:
        """Returns the number of patches along time, height and width of a video of which `frames`
        frames are used.

        Raises DataError for a video that is too narrow to be scaled.
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
            if type(self._videos).__name__ == "Qwen3VLVideoProcessor":  # limits all frames together
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
        """Returns the token ids that represent a video in a prompt, and the video's Frames (frames
        used, and token positions of their features).

        `grid`: patches along time, height and width; `chosen`: indices of the frames used. `encode`
        tokenizes the timestamps, which Qwen3-VL expects as text before each run of placeholders.
        """
        length = self.tokens_of(grid)
        deep: int = self._videos.temporal_patch_size
        if not self.tells_times:
            step = self.step_of(len(chosen), video.total, video.rate)
            frames = Frames(tuple(chosen), video.total, video.rate, step, (0,), length)
            return [self.video_placeholder] * length, frames
        before, behind = (
            token_of(self._folder, self._config, f"vision_{side}_token_id")
            for side in ("start", "end")
        )
        ids: list[int] = []
        starts: list[int] = []
        each = length // grid[0]
        for time in range(grid[0]):
            first = chosen[time * deep] / video.rate
            last = chosen[min(time * deep + deep, len(chosen)) - 1] / video.rate
            ids += encode(f"<{(first + last) / 2:.1f} seconds>")
            ids.append(before)
            starts.append(len(ids))
            ids += [self.video_placeholder] * each + [behind]
        return ids, Frames(tuple(chosen), video.total, video.rate, 1.0, tuple(starts), each)

    def step_of(self, shown: int, total: int, rate: float) -> float:
        """Returns the difference between the time position ids (M-RoPE) of two successive temporal
        patches. `total`: number of frames of the video; `rate`: its frames per second; `shown`:
        number of frames that are used.
        """
        if self._config["model_type"] != "qwen2_5_vl":
            return 1.0
        seconds = self._videos.temporal_patch_size * total / (shown * rate)
        # rounded like transformers' tensor
        a_second: int = self._config["vision_config"].get("tokens_per_second", 4)
        return float(np.float32(seconds)) * a_second

    @cached_property
    def _videos(self) -> Any:
        """Returns the video processor of transformers for the model's folder.

        Raises CheckpointError if the processor scales videos differently from `video_grid_of`.
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
        """Returns the number of features, and thus of placeholder tokens, of an image or video.
        `grid`: its patches along time, height and width.
        """
        time, height, width = grid
        return time * height * width // self.merge**2

    def pixels(self, image: PlacedImage) -> Tensor:
        """Returns the patches [t * h * w, C] of an image or video, in float32; C is the number of
        values per patch. If `image.source` is a tensor of patches, returns it unchanged.

        Caches the patches of recent files and does not read these files again. Raises DataError if
        the file can't be read or has changed.
        """
        source, digest = image.source, image.digest
        if isinstance(source, Tensor):
            return source
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        begun = self._reading.pop(digest, None)
        self._begin()
        found = self._read(image) if begun is None else begun.result()
        self._kept[digest] = found
        self._bytes += found.nbytes
        while self._bytes > KEPT and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes
        return found

    def read_ahead(self, images: Iterable[PlacedImage]) -> None:
        """Starts to read images and videos in threads, a few at a time, so that `pixels` finds them
        ready. `images`: in the order in which `pixels` will be called. Discards earlier reads of
        files that are not in `images`.
        """
        self._coming = deque(images)
        wanted = {image.digest for image in self._coming}
        self._reading = {name: read for name, read in self._reading.items() if name in wanted}
        self._begin()

    def _begin(self) -> None:
        while self._coming and len(self._reading) < AHEAD:
            image = self._coming.popleft()
            known = image.digest in self._kept or image.digest in self._reading
            if not known and not isinstance(image.source, Tensor):
                self._reading[image.digest] = self._readers.submit(self._read, image)

    @cached_property
    def _readers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(READERS, thread_name_prefix="images")

    def _read(self, image: PlacedImage) -> Tensor:
        source = image.source
        assert not isinstance(source, Tensor)
        if image.frames is None:
            return self.patches_of(read_image(source, image.digest))
        return self.video_patches_of(read_video(str(source), image.frames, image.digest))

    def patches_of(self, image: Any) -> Tensor:
        """Returns the patches [h * w, C] of a PIL image, in float32; C is the number of values per
        patch.
        """
        made = self._inner(images=[image], return_tensors="pt")
        patches: Tensor = made["pixel_values"].to(torch.float32)
        return patches

    def video_patches_of(self, frames: np.ndarray) -> Tensor:
        """Returns the patches [t * h * w, C] of the frames [T, height, width, 3], in float32; C is
        the number of values per patch.
        """
        made = self._videos(videos=[frames], do_sample_frames=False, return_tensors="pt")
        patches: Tensor = made["pixel_values_videos"].to(torch.float32)
        return patches


def processor_of(folder: str | Path) -> ImageProcessor | None:
    """Returns the processor of a vision-language model's folder; None if the folder has no
    config.json or the config no vision encoder.

    Raises CheckpointError if the folder of a vision-language model has no image settings.
    """
    file = Path(folder) / "config.json"
    sees = file.is_file() and read_json_object(file).get("vision_config")
    return ImageProcessor(folder) if sees else None


def _loaded(folder: Path, tower: dict[str, Any]) -> Any:
    """Returns the image processor of transformers. Raises CheckpointError if its settings are
    missing or do not match the vision encoder's config.
    """
    from transformers import AutoImageProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    file = folder / FILE
    if not file.is_file():
        raise CheckpointError(
            f"{folder} holds no {FILE}, which says how its model is fed images. Copy it from where the model is from."
        )
    read_json_object(file)
    try:
        found: Any = AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, backend="torchvision"
        )
    except Exception as error:  # of a field with an unexpected value
        raise CheckpointError(
            f"{file} can't be used: {type(error).__name__}: {error}. Copy it from where the model is from."
        ) from error
    if not isinstance(found, Qwen2VLImageProcessor) or not found.do_resize:
        raise CheckpointError(
            f"{file}: {type(found).__name__} with do_resize={found.do_resize} is not known here, only a Qwen2VLImageProcessor "
            "that scales images is."
        )
    for name, own in ALIKE.items():
        if name in tower and tower[name] != getattr(found, own):
            raise CheckpointError(
                f"{file}: {own}={getattr(found, own)}, but config.json says vision_config.{name}={tower[name]}. They must be of "
                "one model."
            )
    return found


def token_of(folder: Path, config: dict[str, Any], name: str) -> int:
    """Returns the token id that config.json has under `name`. Raises CheckpointError if there is no
    such id.
    """
    token = config.get(name)
    if not isinstance(token, int) or isinstance(token, bool):
        raise CheckpointError(f"{folder}/config.json: {name}={token!r} is no token's id.")
    return token
