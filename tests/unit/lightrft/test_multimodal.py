from typing import Any

import pytest

from rftmega.lightrft.strategy import StrategyBase

PROMPTS = ["a", "b", "c"]


def build(
    images: Any = None, images_num: Any = None, videos: Any = None, videos_num: Any = None
) -> list[Any]:
    """Of each prompt: its media, in the order image, video; None without."""
    found = StrategyBase._build_multimodal_inputs(PROMPTS, images, images_num, videos, videos_num)
    assert [each["prompt"] for each in found] == PROMPTS
    return [each.get("multi_modal_data") for each in found]


NESTED = [["p", "q"], ["r"], ["s", "t", "u"]]
FLAT = list("pqrstu")


def test_both_layouts_say_the_same() -> None:
    expected = [{"image": media} for media in NESTED]
    assert build(NESTED) == build(NESTED, [2, 1, 3]) == build(FLAT, [2, 1, 3]) == expected
    assert (
        build(videos=FLAT, videos_num=[2, 1, 3])
        == build(videos=NESTED)
        == [{"video": media} for media in NESTED]
    )


def test_prompts_without_media_have_none() -> None:
    assert (
        build()
        == build([None, None, None])
        == build([[], [], []])
        == build([], [0, 0, 0])
        == [None, None, None]
    )
    assert build(images_num=[0, 0, 0]) == [None, None, None]
    assert (
        build([None, ["p"], None])
        == build(["p"], [0, 1, 0])
        == build([None, "p", None])
        == [None, {"image": ["p"]}, None]
    )


def test_one_each_needs_no_numbers() -> None:
    assert build(["p", "q", "r"]) == [{"image": ["p"]}, {"image": ["q"]}, {"image": ["r"]}]


def test_images_and_films_mix() -> None:
    found = build(FLAT[:2], [2, 0, 0], ["v"], [1, 0, 0])
    assert found == [{"image": ["p", "q"], "video": ["v"]}, None, None]
    assert build(["p"], [0, 1, 0], ["v", "w"], [0, 0, 2]) == [
        None,
        {"image": ["p"]},
        {"video": ["v", "w"]},
    ]


def test_films_that_are_lists_of_frames_are_told_from_lists_of_films_by_their_numbers() -> None:
    films = [["f1", "f2"], ["f3", "f4"], ["f5", "f6"]]
    assert build(videos=films, videos_num=[2, 0, 1]) == [
        {"video": films[:2]},
        None,
        {"video": films[2:]},
    ]
    assert build(videos=films, videos_num=[2, 2, 2]) == [{"video": film} for film in films]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((FLAT, [2, 1, 2]), "adds up to 5, but there are 6 images"),
        ((FLAT, [6]), "images_num has 1 entries for 3 prompts"),
        ((FLAT,), "6 images for 3 prompts"),
        ((None, [1, 0, 0]), "images_num asks for 1 images, but all_images is None"),
        ((None, None, ["v"], [0, 0, 2]), "videos_num adds up to 2"),
    ],
)
def test_what_does_not_add_up_is_refused(given: tuple[Any, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        build(*given)
