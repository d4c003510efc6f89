"""Requests with pictures and videos, as vLLM takes them."""

from functools import lru_cache
from typing import Any

import torch

from rftmega.errors import EngineError
from rftmega.media.files import read_picture
from rftmega.media.placed import Frames, pictures_of, unexpanded
from rftmega.media.processor import PictureProcessor
from rftmega.media.videos import read_video
from rftmega.rollout.base import Request

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
        source, frames = picture.source, picture.frames
        if isinstance(source, torch.Tensor):
            raise EngineError(
                "vLLM reads pictures, and a prompt has one as patches. Give the file, or its bytes."
            )
        kind = "image" if frames is None else "video"
        media.setdefault(kind, []).append(decoded(source, frames, picture.digest))
        digests.setdefault(kind, []).append(picture.digest)
    return {
        "prompt_token_ids": unexpanded(request.token_ids, request.pictures),
        "multi_modal_data": media,
        "multi_modal_uuids": digests,
    }


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


def check_pixels(engine: Any, processor: PictureProcessor, *, videos: bool) -> None:
    """Raises EngineError where vLLM makes other patches of a picture, or of a video where `videos`
    says so, than the trainer.

    Image processors of other back-ends scale pictures differently, which nobody would notice.
    """
    from PIL import Image

    width, height = SAMPLE
    values = torch.arange(DEPTH * width * height * 3).mul(7).remainder(251).to(torch.uint8)
    film = values.view(DEPTH, height, width, 3).numpy()
    picture = Image.fromarray(film[0])
    _compare(
        _made(engine, processor.placeholder, "image", picture)["pixel_values"].data,
        processor.patches_of(picture),
    )
    if videos:
        frames = Frames(tuple(range(DEPTH)), DEPTH, 2.0, 1.0, (0,), 1)
        shown = (film, metadata_of(frames))
        _compare(
            _made(engine, processor.video_placeholder, "video", shown)["pixel_values_videos"].data,
            processor.video_patches_of(film),
        )


def _made(engine: Any, placeholder: int, kind: str, content: Any) -> Any:
    """Returns what vLLM makes of a picture or video."""
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    own = engine.renderer.mm_processor
    items = own.info.parse_mm_data({kind: [content]})
    inputs = ProcessorInputs(prompt=[placeholder], mm_data_items=items)
    (made,) = own.apply(inputs, TimingContext(enabled=False))["mm_kwargs"][kind]
    return made


def _compare(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    if theirs.dtype != ours.dtype or not torch.equal(theirs, ours):
        raise EngineError(
            "vLLM makes other numbers of a picture than the trainer: the image processors of the two differ. Is another "
            "version of torchvision or transformers installed than requirements/ has, or does the model's folder say "
            "do_sample_frames?"
        )
