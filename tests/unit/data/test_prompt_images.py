"""Prompts with images: what a column may hold, and what is said where it can't be used."""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from rftmega.config import (
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rftmega.core.errors import DataError
from rftmega.core.types import Prompt
from rftmega.data.media.image_processor import processor_of
from rftmega.data.media_reader import MediaOptions
from rftmega.data.preference import load_preferences
from rftmega.data.prompt_images import ImageReader, Most, check_images
from rftmega.data.prompts import load_prompts
from rftmega.data.splits import given_of, prompts_of
from rftmega.data.supervised import Example, load_supervised, rows_of
from rftmega.data.tokenizer import Tokenizer
from tests.tiny_vision import IM_END, IMAGE, IMAGE_TEXT, VISION_END, VISION_START, save_tiny_vision

SIZES = {"a.png": (64, 96), "b.png": (100, 50)}  # height, width: 6 and 6 tokens
TOKENS = {"a.png": 6, "b.png": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    save_tiny_vision(folder / "model", "qwen2_5_vl")
    (folder / "data/inside").mkdir(parents=True)
    drawn = np.random.default_rng(0)
    for name, (height, width) in SIZES.items():
        noise = drawn.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / "data/inside" / name)
    Image.new("RGB", (2100, 3)).save(folder / "data/inside/strip.png")
    return folder


def content(folder: Path, name: str) -> bytes:
    return (folder / "data/inside" / name).read_bytes()


def load(
    folder: Path, records: list[dict[str, Any]], *, max_images: int = 2, **how: Any
) -> list[Prompt]:
    (folder / "data/records.jsonl").write_text("\n".join(map(json.dumps, records)))
    return load_from(folder, folder / "data/records.jsonl", max_images=max_images, **how)


def load_from(folder: Path, source: Path, *, max_images: int, **how: Any) -> list[Prompt]:
    limit = how.pop("limit", 40)
    columns = how.pop("columns", False)
    places = how.pop("places", None)
    return load_prompts(
        source,
        Tokenizer(folder / "model"),
        DataConfig(**how),
        max_prompt_tokens=limit,
        columns=columns,
        processor=processor_of(folder / "model"),
        max_images=max_images,
        places=places,
    )


def letters(text: str) -> list[int]:
    return [ord(letter) - 24 for letter in text]


def test_placeholders_are_expanded_where_the_images_are(folder: Path) -> None:
    names = ["inside/a.png", "inside/b.png"]
    (prompt,) = load(
        folder, [{"prompt": f"x<image>y{IMAGE_TEXT}z", "label": "1", "images": names}], max_images=2
    )
    first, second = prompt.images
    wanted = [
        *letters("x"), VISION_START, *[IMAGE] * first.tokens, VISION_END,
        *letters("y"), VISION_START, *[IMAGE] * second.tokens, VISION_END, *letters("z"),
    ]  # fmt: skip
    assert list(prompt.token_ids) == wanted
    assert (first.start, second.start) == (2, 2 + first.tokens + 3)
    assert first.source == str(folder / "data" / names[0])
    patches = processor_of(folder / "model").pixels(first)  # type: ignore[union-attr]
    assert first.patches == len(patches) == 4 * first.tokens


def forms(folder: Path) -> dict[str, Any]:
    text = base64.b64encode(content(folder, "a.png")).decode()
    return {
        "a path": "inside/a.png",
        "a list": ["inside/a.png"],
        "an absolute path": str(folder / "data/inside/a.png"),
        "base64": f"data:image/png;base64,{text}",
        "as datasets has it": {"bytes": None, "path": "inside/a.png"},
    }


def test_every_form_is_the_same_image(folder: Path) -> None:
    records = [
        {"prompt": "<image>", "label": "", "images": form} for form in forms(folder).values()
    ]
    found = load(folder, records)
    assert {prompt.token_ids for prompt in found} == {found[0].token_ids}
    assert {prompt.images for prompt in found} == {found[0].images}


def test_bytes_come_from_parquet(folder: Path) -> None:
    column = [[{"bytes": content(folder, "b.png"), "path": None}], []]
    rows = {"prompt": ["<image>?", "none"], "label": ["1", "2"], "images": column}
    parquet.write_table(pa.table(rows), folder / "data/records.parquet")
    first, second = load_from(folder, folder / "data/records.parquet", max_images=1, columns=True)
    assert first.images[0].source == content(folder, "b.png")
    assert json.loads(first.record)["images"] == [""], "a reward is not given bytes"
    assert second.images == ()


def test_parts_of_chat_messages_are_places_too(folder: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "?"}]
    as_parts = [{"role": "user", "content": parts}]
    as_mark = [{"role": "user", "content": "<image>?"}]
    found = load(
        folder,
        [{"prompt": p, "label": "1", "images": "inside/a.png"} for p in (as_parts, as_mark)],
    )
    assert found[0].token_ids == found[1].token_ids
    assert found[0].token_ids.count(IMAGE) == found[0].images[0].tokens
    assert len(found[0].token_ids) > found[0].images[0].tokens + 10, "no template was used"


def test_other_keys_and_folders_are_options(folder: Path) -> None:
    record = {"prompt": "<image>", "label": "1", "seen": "a.png"}
    (prompt,) = load(folder, [record], images_key="seen", media_folder=str(folder / "data/inside"))
    assert len(prompt.images) == 1


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "?", "images": "inside/a.png"}, '0 place.s. for images and "images" names 1'),
        ({"prompt": "<image>", "images": []}, '1 place.s. for images and "images" names 0'),
        ({"prompt": "<image>"}, "names 0"),
        ({"prompt": "<image>" * 3, "images": ["inside/a.png"] * 3}, "rollout.max_images is 2"),
        ({"prompt": "<image>", "images": "https://a.org/b.png"}, "is not fetched"),
        ({"prompt": "<image>", "images": "../model/config.json"}, "leads out of"),
        ({"prompt": "<image>", "images": "/etc/hostname"}, "leads out of"),
        ({"prompt": "<image>", "images": "inside/none.png"}, "none.png can't be read"),
        ({"prompt": "<image>", "images": "data:image/png;base64,%"}, "is no base64"),
        ({"prompt": "<image>", "images": "data:text/plain,abc"}, "is no image"),
        ({"prompt": "<image>", "images": 7}, "holds 7: an image is a path"),
        ({"prompt": "<image>", "images": [None]}, "holds None: an image is a path"),
        ({"prompt": "<image>", "images": "a\0b.png"}, "can't be an image's path: .*null"),
        ({"prompt": "<image>", "images": "x" * 5000}, "can't be read"),
        ({"prompt": "<image>", "images": "inside"}, "is no file"),
        ({"prompt": "<image>", "images": "inside/strip.png"}, "2100 x 3 pixels can't be used"),
        ({"prompt": IMAGE_TEXT.replace("image", "video")}, "1 place.s. for videos"),
        ({"prompt": IMAGE_TEXT}, "1 place.s. for images"),
        (
            {"prompt": "<image>" + "x" * 35, "images": "inside/a.png"},
            "with its 1 image.s., video.s. or waveform.s., rollout",
        ),
    ],
)
def test_what_can_t_be_used_is_named_with_its_line(
    folder: Path, record: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=f"records.jsonl:1: .*{said}"):
        load(folder, [record | {"label": "1"}])


def test_a_prompt_that_is_too_long_with_its_image_is_dropped_where_that_is_asked(
    folder: Path,
) -> None:
    fits = {"prompt": "x" * 8, "label": "1"}
    too_long = fits | {"prompt": "<image>", "images": "inside/b.png"}
    assert len(load(folder, [fits, too_long], limit=8, too_long="drop")) == 1


def test_a_model_without_a_tower_is_given_no_image(folder: Path) -> None:
    (folder / "data/records.jsonl").write_text(
        json.dumps({"prompt": "?", "label": "1", "images": "inside/a.png"})
    )
    with pytest.raises(DataError, match="the model has no vision tower"):
        load_prompts(
            folder / "data/records.jsonl",
            Tokenizer(folder / "model"),
            DataConfig(),
            max_prompt_tokens=9,
        )


def test_each_process_decodes_its_share_and_names_what_is_broken(folder: Path) -> None:
    file = io.BytesIO()
    drawn = np.random.default_rng(1)
    records: list[dict[str, Any]] = [{"prompt": "no image", "label": "1"}]
    places: list[str] = []
    for number in range(6):
        file = io.BytesIO()
        noise = drawn.integers(0, 256, (60, 60, 3), dtype=np.uint8)
        Image.fromarray(noise).save(file, format="PNG")
        (folder / f"data/inside/cut{number}.png").write_bytes(file.getvalue()[:-200])
        records.append({"prompt": "<image>", "label": "1", "images": f"inside/cut{number}.png"})
    prompts = load(folder, records, places=places)
    named = []
    for rank in range(4):
        with pytest.raises(DataError) as error:
            check_images(prompts, places, rank=rank, ranks=4)
        lines = str(error.value).splitlines()
        named += [
            n
            for n in range(6)
            if any(f"records.jsonl:{n + 2}: " in x and f"cut{n}.png is broken" in x for x in lines)
        ]
    assert sorted(named) == list(range(6))
    good = load(folder, [{"prompt": "<image>", "label": "", "images": "inside/a.png"}])
    check_images(good, ["a"], rank=0, ranks=1)


def test_images_of_pil_are_taken_and_a_circle_of_links_is_not(folder: Path) -> None:
    reader = ImageReader(
        processor_of(folder / "model"), DataConfig(), folder / "data/records.jsonl", Most(2, 0)
    )
    with Image.open(folder / "data/inside/a.png") as image:
        sources = reader.sources({"images": image})
    _, (placed,) = reader.placed([IMAGE], sources)
    assert placed.tokens == TOKENS["a.png"]
    circle = folder / "data/circle.png"
    circle.symlink_to(circle)
    with pytest.raises(DataError, match="can't be an image's path"):
        reader.sources({"images": "circle.png"})


def test_a_link_leads_out_of_the_folder_no_more_than_a_path_does(folder: Path) -> None:
    (folder / "data/out.png").symlink_to(folder / "model/config.json")
    with pytest.raises(DataError, match="leads out of"):
        load(folder, [{"prompt": "<image>", "label": "1", "images": "out.png"}])


LIMITS = {"max_prompt_tokens": 99, "max_response_tokens": 30}


def test_a_reward_model_s_preferences_have_no_images_yet(folder: Path) -> None:
    record = {"prompt": "?", "response": "1", "chosen": "1", "rejected": "2", "images": []}
    path = folder / "data/given.jsonl"
    path.write_text(json.dumps(record))
    assert len(load_preferences(path, Tokenizer(folder / "model"), DataConfig(), **LIMITS)) == 1
    path.write_text(json.dumps(record | {"images": ["inside/a.png"]}))
    with pytest.raises(DataError, match='given.jsonl:1: "images" names images'):
        load_preferences(path, Tokenizer(folder / "model"), DataConfig(), **LIMITS)


def test_both_responses_of_a_pair_follow_the_features_of_the_prompt_s_images(folder: Path) -> None:
    path = folder / "data/given.jsonl"
    shown = {"role": "user", "content": [{"type": "image", "image": "inside/a.png"}]}
    both = [[shown, {"role": "assistant", "content": word}] for word in ("1", "23")]
    records = [
        {"prompt": "x<image>", "chosen": "1", "rejected": "23", "images": ["inside/a.png"]},
        {"chosen": both[0], "rejected": both[1]},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    media, limits = MediaOptions(processor_of(folder / "model"), max_images=2), LIMITS
    tokenizer = Tokenizer(folder / "model")
    for pair in load_preferences(path, tokenizer, DataConfig(), media=media, **limits):
        for example, word in ((pair.chosen, "1"), (pair.rejected, "23")):
            assert [image.tokens for image in example.images] == [TOKENS["a.png"]]
            (image,) = example.images
            assert list(example.prompt_ids[image.start : image.end]) == [IMAGE] * image.tokens
            assert list(example.response_ids) == [*letters(word), IM_END]


def supervised(folder: Path, *records: Any, **how: Any) -> list[Example]:
    path = folder / "data/given.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    media = MediaOptions(processor_of(folder / "model"), max_images=2)
    limits = {**LIMITS, **{name: how.pop(name) for name in LIMITS if name in how}}
    places = how.pop("places", None)
    return load_supervised(
        path, Tokenizer(folder / "model"), DataConfig(**how), media=media, places=places, **limits
    )


def seen(sizes: Sequence[int]) -> list[list[int]]:
    return [[VISION_START, *[IMAGE] * size, VISION_END] for size in sizes]


def test_an_answer_about_images_is_trained_behind_their_features(folder: Path) -> None:
    names = ["inside/a.png", "inside/b.png"]
    a, b = seen([TOKENS["a.png"], TOKENS["b.png"]])
    record = {"prompt": "x<image>y<image>", "response": "of <image>", "images": names}
    text, plain = supervised(folder, record, {"prompt": "z", "response": "w"})
    assert list(text.prompt_ids) == [*letters("x"), *a, *letters("y"), *b]
    assert list(text.response_ids) == [*letters("of <image>"), IM_END]
    assert [(each.start, each.tokens) for each in text.images] == [(2, 6), (11, 8)]
    rows = rows_of([text, plain])
    assert rows.images is not None
    assert [len(row) for row in rows.images.rows] == [2, 0]
    assert rows.mask.sum(1).tolist() == [len("of <image>") + 1, 2]
    assert rows_of([plain]).images is None


def test_each_turn_of_a_conversation_sees_the_images_before_it(folder: Path) -> None:
    """In OpenAI's parts and by marks, both turns in one row."""
    shown = {"type": "image_url", "image_url": {"url": "inside/a.png"}}
    first = {"role": "user", "content": [shown, {"type": "text", "text": "?"}]}
    messages = [
        *(first, {"role": "assistant", "content": "1"}),
        *({"role": "user", "content": [{**shown, "image_url": {"url": "inside/b.png"}}]},),
        {"role": "assistant", "content": "2"},
    ]
    places: list[str] = []
    (found,) = supervised(
        folder, {"prompt": messages}, trained_turns="all", max_response_tokens=60, places=places
    )
    whole = [*found.prompt_ids, *found.response_ids]
    for image in found.images:
        assert whole[image.start : image.end] == [IMAGE] * image.tokens
    assert [image.tokens for image in found.images] == [6, 8]
    assert whole.count(IMAGE) == 14
    assert found.images[1].start > len(found.prompt_ids), "it is shown after the first answer"
    rows = rows_of([found])
    trained = rows.tokens[0, 1:][rows.mask[0]].tolist()
    assert trained == [*letters("1"), IM_END, *letters("2"), IM_END]
    assert [place.rpartition("/")[2] for place in places] == ["given.jsonl:1"]
    (last,) = supervised(folder, {"prompt": messages})
    assert last.images == found.images
    assert len(last.prompt_ids) > len(found.prompt_ids)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "<image>", "response": "1"}, "1 place(s) for images"),
        ({"prompt": "x", "response": "1", "images": ["inside/a.png"]}, "0 place(s) for images"),
        ({"prompt": "<image>", "response": "1", "images": ["none.png"]}, "none.png"),
        ({"prompt": "x", "response": IMAGE_TEXT}, "reads as a control token"),
        (
            {"prompt": "<image>" * 3, "response": "1", "images": ["inside/a.png"] * 3},
            "a prompt with 3 images: rollout.max_images is 2",
        ),
        (
            {"prompt": "<image>" * 2, "response": "1", "images": ["inside/a.png"] * 2},
            "16 tokens with its 2 image(s)",
        ),
    ],
)
def test_an_example_whose_images_do_not_fit_is_refused(
    record: Any, said: str, folder: Path
) -> None:
    with pytest.raises(DataError, match=r"given\.jsonl:1: ") as caught:
        supervised(folder, record, max_prompt_tokens=15)
    assert said in str(caught.value)


def test_a_response_with_an_image_is_refused(folder: Path) -> None:
    part = {"type": "image", "image": "inside/a.png"}
    messages = [
        {"role": "user", "content": "draw"},
        {"role": "assistant", "content": [part, {"type": "text", "text": "here"}]},
    ]
    with pytest.raises(DataError, match="responses and preferences are text alone"):
        supervised(folder, {"prompt": messages})


def test_a_supervised_run_decodes_its_images_before_it_starts(folder: Path) -> None:
    (folder / "data/inside/half.png").write_bytes(content(folder, "a.png")[:-200])
    path = folder / "data/sft.jsonl"
    lines = [
        {"prompt": "x", "response": "1"},
        {"prompt": "<image>", "response": "1", "images": "inside/half.png"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    config = RunConfig(
        model=ModelConfig(path=str(folder / "model")),
        data=DataConfig(train=str(path)),
        algorithm=AlgorithmConfig(task="sft"),
    )
    with pytest.raises(DataError, match=r"sft.jsonl:2: .*half.png is broken"):
        given_of(config, Tokenizer(folder / "model"))
    lines[1]["images"] = "inside/b.png"
    path.write_text("\n".join(map(json.dumps, lines)))
    given_of(config, Tokenizer(folder / "model"))
    config.trainer.max_patches_per_micro_batch = 8
    with pytest.raises(DataError, match=r"sft.jsonl:2: its images have 32 patches together"):
        given_of(config, Tokenizer(folder / "model"))


@pytest.mark.parametrize("broken", ["train", "eval"])
def test_a_run_decodes_the_images_of_all_its_files_before_it_starts(
    folder: Path, broken: str
) -> None:
    (folder / "data/inside/cut.png").write_bytes(content(folder, "a.png")[:-200])
    files = {}
    for name in ("train", "eval"):
        files[name] = str(folder / f"data/{name}.jsonl")
        image = "inside/cut.png" if name == broken else "inside/b.png"
        lines = [
            {"prompt": "x" * 50, "label": "1"},
            {"prompt": "<image>", "label": "1", "images": image},
        ]
        Path(files[name]).write_text("\n".join(map(json.dumps, lines)))
    config = RunConfig(
        model=ModelConfig(path=str(folder / "model")),
        data=DataConfig(
            sources={files["train"]: 1.0}, eval=files["eval"], label_key="label", too_long="drop"
        ),
        rollout=RolloutConfig(max_prompt_tokens=20),
    )
    with pytest.raises(DataError, match=rf"{broken}.jsonl:2: .*cut.png is broken"):
        prompts_of(config, Tokenizer(folder / "model"), check=lambda _: None)


def test_a_prompt_whose_images_no_micro_batch_can_hold_is_refused_with_its_line(
    folder: Path,
) -> None:
    """Micro-batches are planned by patches, and a row is not divided."""
    path = folder / "data/train.jsonl"
    lines = [
        {"prompt": "x", "label": "1"},
        {"prompt": "<image>", "label": "1", "images": "inside/b.png"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    config = RunConfig(
        model=ModelConfig(path=str(folder / "model")),
        data=DataConfig(train=str(path)),
        rollout=RolloutConfig(max_prompt_tokens=200),
    )

    def loaded(most: int) -> Any:
        chosen = replace(config, trainer=TrainerConfig(max_patches_per_micro_batch=most))
        order, _ = prompts_of(chosen, Tokenizer(folder / "model"), check=lambda _: None)
        return order

    (patches,) = {
        sum(image.patches for image in prompt.images)
        for prompt in load_from(folder, path, max_images=2, limit=200)
        if prompt.images
    }
    loaded(patches)
    with pytest.raises(
        DataError,
        match=rf"(?s)Set it to {patches} or more.*train.jsonl:2: its images have {patches} patches",
    ):
        loaded(patches - 1)
