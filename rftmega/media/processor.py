"""PictureProcessor turns pictures into what a vision tower is fed."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.errors import CheckpointError, DataError
from rftmega.json_files import read_json_object
from rftmega.media.files import content_of, digest_of, read_picture

FILE = "preprocessor_config.json"
KEPT = 256 * 2**20  # bytes of patches that wait to be used again
# fields of vision_config, and those of FILE that must say the same
ALIKE = {
    "patch_size": "patch_size",
    "spatial_merge_size": "merge_size",
    "temporal_patch_size": "temporal_patch_size",
}


class PictureProcessor:
    """PictureProcessor scales pictures and cuts them into patches, as the model's folder says.

    torchvision does it, as in vLLM: another back-end gives other numbers.
    """

    def __init__(self, folder: str | Path):
        """Raises CheckpointError where the folder says nothing of pictures, or nothing that its model
        can be fed.
        """
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        folder = Path(folder)
        config = read_json_object(folder / "config.json")
        self._inner = _loaded(folder, config.get("vision_config") or {})
        self._smart_resize = smart_resize
        self.placeholder = _token(folder, config, "image_token_id")
        self.of_video = _token(folder, config, "video_token_id")
        # as a text has it, with what stands around it
        self.text = "<|vision_start|><|image_pad|><|vision_end|>"
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

    def tokens_of(self, grid: tuple[int, int, int]) -> int:
        """Returns how many features a picture of these patches has."""
        time, height, width = grid
        return time * height * width // self.merge**2

    def pixels(self, source: str | bytes | Tensor, digest: str = "") -> Tensor:
        """Returns the patches [h * w, C] of a picture's file, or of its bytes, in float32; a tensor
        is returned as it is.

        The last ones are kept: with its `digest`, a picture that is among them is not read again.
        Raises DataError where the file can't be read, or holds something else than it did.
        """
        if isinstance(source, Tensor):
            return source
        content = b""
        if digest not in self._kept:
            content = content_of(source, digest)
            digest = digest or digest_of(content)
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        found = self.patches_of(read_picture(content))
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


def processor_of(folder: str | Path) -> PictureProcessor | None:
    """Returns the processor of a model that sees; None for another, and where there is no model.

    Raises CheckpointError where its folder says nothing of pictures.
    """
    file = Path(folder) / "config.json"
    sees = file.is_file() and read_json_object(file).get("vision_config")
    return PictureProcessor(folder) if sees else None


def _loaded(folder: Path, tower: dict[str, Any]) -> Any:
    """Returns transformers' image processor, which cuts pictures as the tower expects."""
    from transformers import AutoImageProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    file = folder / FILE
    if not file.is_file():
        raise CheckpointError(
            f"{folder} holds no {FILE}, which says how its model is fed pictures. Copy it from where the model is from."
        )
    read_json_object(file)
    try:
        found: Any = AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, backend="torchvision"
        )
    except Exception as error:  # whatever a strange field makes it stumble over
        raise CheckpointError(
            f"{file} can't be used: {type(error).__name__}: {error}. Copy it from where the model is from."
        ) from error
    if not isinstance(found, Qwen2VLImageProcessor) or not found.do_resize:
        raise CheckpointError(
            f"{file}: {type(found).__name__} with do_resize={found.do_resize} is not known here, only a Qwen2VLImageProcessor "
            "that scales pictures is."
        )
    for name, own in ALIKE.items():
        if name in tower and tower[name] != getattr(found, own):
            raise CheckpointError(
                f"{file}: {own}={getattr(found, own)}, but config.json says vision_config.{name}={tower[name]}. They must be of "
                "one model."
            )
    return found


def _token(folder: Path, config: dict[str, Any], name: str) -> int:
    token = config.get(name)
    if not isinstance(token, int) or isinstance(token, bool):
        raise CheckpointError(f"{folder}/config.json: {name}={token!r} is no token's id.")
    return token
