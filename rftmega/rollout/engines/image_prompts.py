"""Converts requests with images and videos to vLLM prompts, and checks that vLLM preprocesses
images as the trainer does.
"""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rftmega.core.errors import EngineError
from rftmega.core.media_positions import Frames, PlacedImage, images_of, unexpanded
from rftmega.data.media.files import read_image
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.data.media.videos import read_video
from rftmega.rollout.requests import Request

SAMPLE = (70, 110)  # width and height of the image compared at the start
DEPTH = 3  # frames of the video compared at the start


def prompt_of(request: Request) -> dict[str, Any]:
    """Returns the request as a vLLM prompt: token ids with one placeholder per image or video,
    which vLLM's processor expands, and the decoded media. Their digests serve as vLLM's cache keys,
    so that an image shared by a group of requests is processed once.

    Raises EngineError for an image that is given only as preprocessed patches.
    """
    if not request.images:
        return {"prompt_token_ids": list(request.token_ids)}
    media: dict[str, list[Any]] = {}
    digests: dict[str, list[str]] = {}
    for image in images_of(request.images):
        kind = "image" if image.frames is None else "video"
        media.setdefault(kind, []).append(decoded_source(image))
        digests.setdefault(kind, []).append(image.digest)
    return {
        "prompt_token_ids": unexpanded(request.token_ids, request.images),
        "multi_modal_data": media,
        "multi_modal_uuids": digests,
    }


def decoded_source(image: PlacedImage) -> Any:
    """Returns the decoded image or video, see `decoded`. Raises EngineError if it is given only as
    preprocessed patches, which vLLM can't read.
    """
    if isinstance(image.source, torch.Tensor):
        raise EngineError(
            "vLLM reads images, and a prompt has one as patches. Give the file, or its bytes."
        )
    return decoded(image.source, image.frames, image.digest)


@lru_cache(maxsize=16)  # samples of one group are requested together
def decoded(source: str | bytes, frames: Frames | None, digest: str) -> Any:
    """Returns the image as a PIL image, or the video as vLLM expects it: (chosen frames, metadata).
    `source`: path or encoded bytes; `frames`: the frames to read from a video, None for an image;
    `digest`: the digest that the content must have. The last 16 results are cached.
    """
    if frames is None:
        return read_image(source, digest)
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
    """Raises EngineError if vLLM expanded the image placeholders of the request's prompt to other
    token ids (`token_ids`) than the trainer: vLLM's processor then also computes other image
    features.
    """
    if request.images and list(token_ids) != list(request.token_ids):
        raise EngineError(
            f"vLLM made {len(token_ids)} tokens of a prompt with {len(request.images)} image(s), the trainer "
            f"{len(request.token_ids)}. preprocessor_config.json of the model's folder may be read differently."
        )


def placeholders(processor: ImageProcessor, *, videos: bool) -> dict[str, int]:
    """Returns the token id that stands for an image in a prompt, under "image", and with `videos`
    also the one for a video, under "video".
    """
    found = {"image": processor.placeholder}
    return found | {"video": processor.video_placeholder} if videos else found


def samples_of_vllm(renderer: Any, tokens: Mapping[str, int]) -> dict[str, str]:
    """Returns checksums of the patches that vLLM's preprocessing makes of a built-in sample image
    and video, by media kind ("image", "video"). `renderer`: vLLM's renderer, which has the
    processor; `tokens`: placeholder token of each media kind to include.
    """
    image, film = _samples()
    frames = Frames(tuple(range(DEPTH)), DEPTH, 2.0, 1.0, (0,), 1)
    contents = {"image": image, "video": (film, metadata_of(frames))}
    fields = {"image": "pixel_values", "video": "pixel_values_videos"}
    made = {kind: _made(renderer, token, kind, contents[kind]) for kind, token in tokens.items()}
    return {kind: _sum(each[fields[kind]].data) for kind, each in made.items()}


def check_samples(theirs: Mapping[str, str], processor: ImageProcessor) -> None:
    """Raises EngineError if vLLM's preprocessing and the trainer's `processor` make different
    patches of the sample image and video. `theirs`: vLLM's checksums from `samples_of_vllm`.

    Image processors with another backend (e.g. of torchvision) scale images slightly differently,
    without any error.
    """
    image, film = _samples()
    ours = {"image": _sum(processor.patches_of(image))}
    if "video" in theirs:
        ours["video"] = _sum(processor.video_patches_of(film))
    if theirs != ours:
        raise EngineError(
            "vLLM makes other numbers of an image than the trainer: the image processors of the two differ. Is another "
            "version of torchvision or transformers installed than requirements/ has, or does the model's folder say "
            "do_sample_frames?"
        )


def _samples() -> tuple[Any, np.ndarray]:
    """Returns a small sample image (PIL) and the frames of a sample video, [frames, height, width,
    3], both filled with computed values.
    """
    from PIL import Image

    width, height = SAMPLE
    values = torch.arange(DEPTH * width * height * 3).mul(7).remainder(251).to(torch.uint8)
    film = values.view(DEPTH, height, width, 3).numpy()
    return Image.fromarray(film[0]), film


def _made(renderer: Any, placeholder: int, kind: str, content: Any) -> Any:
    """Returns the model inputs (`mm_kwargs`) that vLLM's processor makes of one image or video.
    `renderer`: vLLM's renderer, which has the processor; `placeholder`: the token that stands for
    `content` in a prompt; `kind`: "image" or "video".
    """
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    own = renderer.mm_processor
    items = own.info.parse_mm_data({kind: [content]})
    inputs = ProcessorInputs(prompt=[placeholder], mm_data_items=items)
    (made,) = own.apply(inputs, TimingContext(enabled=False))["mm_kwargs"][kind]
    return made


def _sum(patches: torch.Tensor) -> str:
    """Returns a checksum text of the patches: dtype, shape and SHA-256."""
    content = patches.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{patches.dtype} {list(patches.shape)} {hashlib.sha256(content).hexdigest()}"
