"""Prompts with images: what a column may hold, and what is said where it can't be used."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from rftmega.config import DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from rftmega.core.errors import DataError
from rftmega.core.types import Prompt
from rftmega.data.media.image_processor import processor_of
from rftmega.data.preference import load_preferences
from rftmega.data.prompt_images import ImageReader, Most, check_images
from rftmega.data.prompts import load_prompts
from rftmega.data.splits import prompts_of
from rftmega.data.supervised import load_supervised
from rftmega.data.tokenizer import Tokenizer
from tests.tiny_vision import IMAGE, IMAGE_TEXT, VISION_END, VISION_START, save_tiny_vision

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


@pytest.mark.parametrize("load_given", [load_supervised, load_preferences])
def test_given_answers_have_no_images_yet(folder: Path, load_given: Any) -> None:
    record = {"prompt": "?", "response": "1", "chosen": "1", "rejected": "2", "images": []}
    path = folder / "data/given.jsonl"
    limits = {"max_prompt_tokens": 9, "max_response_tokens": 9}
    path.write_text(json.dumps(record))
    assert len(load_given(path, Tokenizer(folder / "model"), DataConfig(), **limits)) == 1
    path.write_text(json.dumps(record | {"images": ["inside/a.png"]}))
    with pytest.raises(DataError, match='given.jsonl:1: "images" names images'):
        load_given(path, Tokenizer(folder / "model"), DataConfig(), **limits)


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
