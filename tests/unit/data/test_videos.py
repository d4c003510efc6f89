"""Prompts with videos: what a column may hold, and what is said where it can't be used."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.core.types import Prompt
from rftmega.data.media.image_processor import processor_of
from rftmega.data.media.videos import read_video
from rftmega.data.prompt_images import check_images
from rftmega.data.prompts import load_prompts
from rftmega.data.tokenizer import Tokenizer
from tests.tiny_vision import (
    FILM,
    IMAGE,
    KINDS,
    VIDEO,
    VISION_END,
    VISION_START,
    save_tiny_vision,
)
from tests.unit.data.media.test_videos import FRAMES, RATE, drawn, image, saved, written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for kind in KINDS:
        save_tiny_vision(folder / kind, kind)
    (folder / "data").mkdir()
    saved(folder / "data/frames", drawn())
    written(folder / "data/a.avi", drawn())
    (folder / "data/p.png").write_bytes(image((64, 48)))
    return folder


def load(
    folder: Path,
    record: dict[str, Any],
    kind: str = "qwen2_5_vl",
    *,
    max_videos: int = 2,
    **how: Any,
) -> Prompt:
    (folder / "data/records.jsonl").write_text(json.dumps({"label": "1"} | record))
    limit = how.pop("limit", 120)
    (prompt,) = load_prompts(
        folder / "data/records.jsonl",
        Tokenizer(folder / kind),
        DataConfig(**how),
        max_prompt_tokens=limit,
        processor=processor_of(folder / kind),
        max_images=1,
        max_videos=max_videos,
    )
    return prompt


def letters(text: str) -> list[int]:
    return [ord(letter) - 24 for letter in text]


def test_a_video_and_a_image_stand_where_their_marks_are(folder: Path) -> None:
    prompt = load(
        folder,
        {"prompt": "a<video>b<image>c", "videos": "frames", "images": "p.png"},
        max_videos=1,
        video_fps=2.0,
        video_frames=4,
    )
    video, seen = prompt.images
    wanted = [
        *letters("a"), VISION_START, *[VIDEO] * video.tokens, VISION_END,
        *letters("b"), VISION_START, *[IMAGE] * seen.tokens, VISION_END, *letters("c"),
    ]  # fmt: skip
    assert list(prompt.token_ids) == wanted
    assert (video.start, seen.start) == (2, 2 + video.tokens + 3)
    assert video.frames is not None
    assert video.frames.chosen == (0, 4, 7, 11)
    assert video.frames.step == 4 * 2 * FRAMES / (4 * 2.0)  # tokens a second x seconds
    assert video.grid[0] == 2


def test_qwen3_vl_is_told_the_times_in_words(folder: Path) -> None:
    prompt = load(
        folder,
        {"prompt": f"{FILM}?", "videos": ["a.avi"]},
        "qwen3_vl",
        video_fps=5.0,
        video_frames=4,
    )
    (video,) = prompt.images
    assert video.frames is not None
    (each,) = {video.frames.length}
    run = [VISION_START, *[VIDEO] * each, VISION_END]
    # frames 0 and 4, 7 and 11, at 10 a second
    times = [
        letters(f"<{(first + last) / 2 / RATE:.1f} seconds>") for first, last in ((0, 4), (7, 11))
    ]
    wanted = [VISION_START, *times[0], *run, *times[1], *run, VISION_END, *letters("?")]
    assert list(prompt.token_ids) == wanted
    assert [prompt.token_ids[begin] for begin, _ in video.runs] == [VIDEO] * 2
    assert video.end == len(wanted) - 2


def test_parts_of_chat_messages_are_places_too(folder: Path) -> None:
    parts = [{"type": "video"}, {"type": "text", "text": "?"}]
    found = [
        load(
            folder, {"prompt": [{"role": "user", "content": content}], "videos": {"path": "frames"}}
        )
        for content in (parts, "<video>?")
    ]
    assert found[0].token_ids == found[1].token_ids
    assert found[0].token_ids.count(VIDEO) == found[0].images[0].tokens


def test_a_mark_is_a_word_of_html_where_prompts_have_no_videos(folder: Path) -> None:
    prompt = load(folder, {"prompt": "<video>"}, max_videos=0)
    assert list(prompt.token_ids) == letters("<video>")


def test_the_key_is_an_option(folder: Path) -> None:
    prompt = load(folder, {"prompt": "<video>", "films": "frames"}, videos_key="films")
    assert len(prompt.images) == 1


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "?", "videos": "frames"}, '0 place.s. for videos and "videos" names 1'),
        ({"prompt": "<video>"}, '1 place.s. for videos and "videos" names 0'),
        ({"prompt": "<video>" * 3, "videos": ["frames"] * 3}, "rollout.max_videos is 2"),
        ({"prompt": "<video>", "videos": "https://a.org/b.mp4"}, "is not fetched"),
        ({"prompt": "<video>", "videos": "../qwen2_vl"}, "leads out of"),
        ({"prompt": "<video>", "videos": "none.mp4"}, "none.mp4 can't be read"),
        ({"prompt": "<video>", "videos": 7}, "holds 7: a video is the path"),
        ({"prompt": "<video>", "videos": {"bytes": "x"}}, "a video is the path"),
        ({"prompt": "<video>", "videos": "p.png"}, "p.png is no video"),
        ({"prompt": "<video>" + "x" * 115, "videos": "frames"}, "lower data.video_frames"),
    ],
)
def test_what_can_t_be_used_is_named_with_its_line(
    folder: Path, record: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=f"records.jsonl:1: .*{said}"):
        load(folder, record)


def test_videos_are_refused_where_nobody_asked_for_them(folder: Path) -> None:
    with pytest.raises(DataError, match="rollout.max_videos is 0"):
        load(folder, {"prompt": "<video>", "videos": "frames"}, max_videos=0)


def test_a_broken_video_is_found_at_the_start(folder: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, drawn().shape, dtype=np.uint8)
    path = written(folder / "data/cut.avi", noise)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    prompt = load(folder, {"prompt": "<video>", "videos": "cut.avi"})
    with pytest.raises(DataError, match="cut.avi is broken"):
        check_images([prompt], ["here"], rank=0, ranks=1)
    check_images(
        [load(folder, {"prompt": "<video>", "videos": "a.avi"})], ["here"], rank=0, ranks=1
    )


def test_a_video_that_was_changed_is_refused(folder: Path) -> None:
    frames = saved(folder / "data/changing", drawn())
    (video,) = load(folder, {"prompt": "<video>", "videos": "changing"}).images
    assert video.frames is not None
    read_video(str(frames), video.frames, video.digest)
    image_of_another = (frames / "frame1.png").read_bytes()
    (frames / f"frame{video.frames.chosen[0]}.png").write_bytes(image_of_another)
    with pytest.raises(DataError, match="changing has changed"):
        read_video(str(frames), video.frames, video.digest)
    (frames / "frame0.png").unlink()
    with pytest.raises(DataError, match="changing has changed"):
        read_video(str(frames), video.frames, video.digest)
