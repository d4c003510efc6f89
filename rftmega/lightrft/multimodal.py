"""Combines prompts with their images and videos into engine inputs."""

from collections.abc import Sequence
from typing import Any


def build_inputs(
    prompts: Sequence[str],
    images: Sequence[Any] | None,
    images_num: Sequence[int] | None,
    videos: Sequence[Any] | None,
    videos_num: Sequence[int] | None,
) -> list[dict[str, Any]]:
    """Returns one dict per prompt: "prompt" and, if the prompt has images or videos,
    "multi_modal_data" with lists under "image" and "video".

    `images` and `videos` are nested (a list, or None, for each prompt) or flat. Of a flat list,
    prompt i takes the next `images_num[i]` (`videos_num[i]`) items, or one item if these numbers
    are None. Raises ValueError if numbers, media and prompts don't match.
    """
    image_lists = _by_prompt("images", len(prompts), images, images_num)
    films = _by_prompt("videos", len(prompts), videos, videos_num)
    inputs: list[dict[str, Any]] = []
    for prompt, image, video in zip(prompts, image_lists, films, strict=True):
        data = {name: media for name, media in (("image", image), ("video", video)) if media}
        inputs.append({"prompt": prompt, "multi_modal_data": data} if data else {"prompt": prompt})
    return inputs


def _by_prompt(
    kind: str, prompts: int, media: Sequence[Any] | None, numbers: Sequence[int] | None
) -> list[list[Any]]:
    if media is None:
        if numbers is not None and any(numbers):
            raise ValueError(
                f"{kind}_num asks for {sum(numbers)} {kind}, but all_{kind} is None. Give them, or no numbers."
            )
        return [[] for _ in range(prompts)]
    if numbers is not None and len(numbers) != prompts:
        raise ValueError(
            f"{kind}_num has {len(numbers)} entries for {prompts} prompts. Give one each."
        )
    nested = len(media) == prompts and all(
        each is None or isinstance(each, list | tuple) for each in media
    )
    # A video may be a list of frames: then the numbers tell flat from nested.
    if nested and (numbers is None or [len(each or ()) for each in media] == list(numbers)):
        return [list(each or ()) for each in media]
    if numbers is None:
        if len(media) != prompts:
            raise ValueError(
                f"{len(media)} {kind} for {prompts} prompts: say in {kind}_num how many each prompt has."
            )
        return [[] if each is None else [each] for each in media]
    if sum(numbers) != len(media):
        raise ValueError(
            f"{kind}_num adds up to {sum(numbers)}, but there are {len(media)} {kind}."
        )
    ends = [sum(numbers[: i + 1]) for i in range(prompts)]
    return [list(media[end - number : end]) for end, number in zip(ends, numbers, strict=True)]
