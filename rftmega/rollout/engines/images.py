"""Requests with pictures and videos, as vLLM takes them."""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rftmega.core.errors import EngineError
from rftmega.core.media_positions import Frames, PlacedPicture, pictures_of, unexpanded
from rftmega.data.media.files import read_picture
from rftmega.data.media.image_processor import PictureProcessor
from rftmega.data.media.videos import read_video
from rftmega.rollout.requests import Request

SAMPLE = (70, 110)  # width and height of the picture that is compared at the start
DEPTH = 3  # frames of the video that is


def prompt_of(request: Request) -> dict[str, Any]:
    """Returns vLLM's prompt: one placeholder a picture or video, since its processor expands it, and
    these under their digests, so that one of a group is processed once.

    Raises EngineError for one that is there as patches alone.
    """
    if not request.pictures:
        return {"prompt_token_ids": list(request.token_ids)}
    media: dict[str, list[Any]] = {}
    digests: dict[str, list[str]] = {}
    for picture in pictures_of(request.pictures):
        kind = "image" if picture.frames is None else "video"
        media.setdefault(kind, []).append(decoded_source(picture))
        digests.setdefault(kind, []).append(picture.digest)
    return {
        "prompt_token_ids": unexpanded(request.token_ids, request.pictures),
        "multi_modal_data": media,
        "multi_modal_uuids": digests,
    }


def decoded_source(picture: PlacedPicture) -> Any:
    """Returns what `decoded` does. Raises EngineError for a picture that is there as patches alone."""
    if isinstance(picture.source, torch.Tensor):
        raise EngineError(
            "vLLM reads pictures, and a prompt has one as patches. Give the file, or its bytes."
        )
    return decoded(picture.source, picture.frames, picture.digest)


@lru_cache(maxsize=16)  # siblings are asked side by side
def decoded(source: str | bytes, frames: Frames | None, digest: str) -> Any:
    """Returns a picture, or a video as vLLM takes it: frames that are chosen already, and when they
    are shown.
    """
    if frames is None:
        return read_picture(source, digest)
    return read_video(str(source), frames, digest), metadata_of(frames)


def metadata_of(frames: Frames) -> dict[str, Any]:
    return {
        "total_num_frames": frames.total,
        "fps": frames.rate,
        "duration": frames.total / frames.rate,
        "frames_indices": list(frames.chosen),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def check_expanded(request: Request, token_ids: Any) -> None:
    """Raises EngineError where vLLM answered another prompt than was asked: its processor makes
    other features of a picture.
    """
    if request.pictures and list(token_ids) != list(request.token_ids):
        raise EngineError(
            f"vLLM made {len(token_ids)} tokens of a prompt with {len(request.pictures)} picture(s), the trainer "
            f"{len(request.token_ids)}. preprocessor_config.json of the model's folder may be read differently."
        )


def placeholders(processor: PictureProcessor, *, videos: bool) -> dict[str, int]:
    """Returns the kinds of media that are compared, and the token that stands for each."""
    found = {"image": processor.placeholder}
    return found | {"video": processor.video_placeholder} if videos else found


def samples_of_vllm(renderer: Any, tokens: Mapping[str, int]) -> dict[str, str]:
    """Returns checksums of what vLLM makes of a sample of each kind, under the token that stands for
    it.
    """
    picture, film = _samples()
    frames = Frames(tuple(range(DEPTH)), DEPTH, 2.0, 1.0, (0,), 1)
    contents = {"image": picture, "video": (film, metadata_of(frames))}
    fields = {"image": "pixel_values", "video": "pixel_values_videos"}
    made = {kind: _made(renderer, token, kind, contents[kind]) for kind, token in tokens.items()}
    return {kind: _sum(each[fields[kind]].data) for kind, each in made.items()}


def check_samples(theirs: Mapping[str, str], processor: PictureProcessor) -> None:
    """Raises EngineError where vLLM makes other patches of the samples than the trainer.

    Image processors of other back-ends scale pictures differently, which nobody would notice.
    """
    picture, film = _samples()
    ours = {"image": _sum(processor.patches_of(picture))}
    if "video" in theirs:
        ours["video"] = _sum(processor.video_patches_of(film))
    if theirs != ours:
        raise EngineError(
            "vLLM makes other numbers of a picture than the trainer: the image processors of the two differ. Is another "
            "version of torchvision or transformers installed than requirements/ has, or does the model's folder say "
            "do_sample_frames?"
        )


def _samples() -> tuple[Any, np.ndarray]:
    """Returns a picture, and frames of a video."""
    from PIL import Image

    width, height = SAMPLE
    values = torch.arange(DEPTH * width * height * 3).mul(7).remainder(251).to(torch.uint8)
    film = values.view(DEPTH, height, width, 3).numpy()
    return Image.fromarray(film[0]), film


def _made(renderer: Any, placeholder: int, kind: str, content: Any) -> Any:
    """Returns what vLLM makes of a picture or video."""
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    own = renderer.mm_processor
    items = own.info.parse_mm_data({kind: [content]})
    inputs = ProcessorInputs(prompt=[placeholder], mm_data_items=items)
    (made,) = own.apply(inputs, TimingContext(enabled=False))["mm_kwargs"][kind]
    return made


def _sum(patches: torch.Tensor) -> str:
    """Returns the dtype, the shape and SHA-256 of patches."""
    content = patches.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{patches.dtype} {list(patches.shape)} {hashlib.sha256(content).hexdigest()}"
