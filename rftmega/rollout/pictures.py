"""Requests with pictures, as vLLM takes them."""

from functools import lru_cache
from typing import Any

import torch

from rftmega.errors import EngineError
from rftmega.media.files import read_picture
from rftmega.media.placed import unexpanded
from rftmega.media.processor import PictureProcessor
from rftmega.rollout.base import Request

decoded = lru_cache(maxsize=16)(read_picture)  # siblings are asked side by side
SAMPLE = (70, 110)  # width and height of the picture that is compared at the start


def prompt_of(request: Request) -> dict[str, Any]:
    """Returns vLLM's prompt: one placeholder a picture, since its processor expands it, and the
    pictures under their digests, so that one of a group is processed once.

    Raises EngineError for a picture that is there as patches alone.
    """
    if not request.pictures:
        return {"prompt_token_ids": list(request.token_ids)}
    images = []
    for picture in request.pictures:
        if isinstance(picture.source, torch.Tensor):
            raise EngineError(
                "vLLM reads pictures, and a prompt has one as patches. Give the file, or its bytes."
            )
        images.append(decoded(picture.source, picture.digest))
    return {
        "prompt_token_ids": unexpanded(request.token_ids, request.pictures),
        "multi_modal_data": {"image": images},
        "multi_modal_uuids": {"image": [picture.digest for picture in request.pictures]},
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


def check_pixels(engine: Any, processor: PictureProcessor) -> None:
    """Raises EngineError where vLLM makes other patches of a picture than the trainer.

    Image processors of other back-ends scale pictures differently, which nobody would notice.
    """
    from PIL import Image
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    width, height = SAMPLE
    values = torch.arange(width * height * 3).mul(7).remainder(251).to(torch.uint8)
    picture = Image.fromarray(values.view(height, width, 3).numpy())
    own = engine.renderer.mm_processor
    items = own.info.parse_mm_data({"image": [picture]})
    inputs = ProcessorInputs(prompt=[processor.placeholder], mm_data_items=items)
    (made,) = own.apply(inputs, TimingContext(enabled=False))["mm_kwargs"]["image"]
    theirs, ours = made["pixel_values"].data, processor.patches_of(picture)
    if theirs.dtype != ours.dtype or not torch.equal(theirs, ours):
        raise EngineError(
            "vLLM makes other numbers of a picture than the trainer: the image processors of the two differ. Is another "
            "version of torchvision or transformers installed than requirements/ has?"
        )
