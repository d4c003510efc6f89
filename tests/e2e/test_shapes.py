"""The data of examples/shapes are what they say, and fit its model and its grpo.yaml."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.shapes import make_data, warm_start
from rftmega.config import load
from rftmega.config.validation import violations
from tests.e2e.conftest import ROOT

SIZES = {"eval": 200, "warm_start": 1000, "train": 2000}
Record = dict[str, str | list[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shapes")
    make_data.write(made)
    return made


def records(folder: Path, name: str) -> list[Record]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def patches_of(colour: str, path: Path) -> int:
    """Counts the connected patches of a colour that is clearly the strongest of its pixel."""
    with Image.open(path) as image:
        assert image.size == (48, 48)
        pixels = np.asarray(image.convert("RGB")).astype(int)
    channel = ("red", "green", "blue").index(colour)
    others = np.delete(pixels, channel, axis=-1).max(-1)
    rest = {(int(y), int(x)) for y, x in np.argwhere(pixels[..., channel] > others + 100)}
    found = 0
    while rest:
        found += 1
        edge = [rest.pop()]
        while edge:
            y, x = edge.pop()
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & rest
            rest -= near
            edge += near
    return found


@pytest.mark.parametrize(("name", "every"), [("eval", 1), ("warm_start", 10), ("train", 10)])
def test_a_label_is_the_number_of_patches_of_the_colour_in_the_image(
    name: str, every: int, folder: Path
) -> None:
    for record in records(folder, name)[::every]:
        colour = record["prompt"].removeprefix("<image>how many ").removesuffix("?")
        (path,) = record["images"]
        assert int(record["label"]) == patches_of(colour, folder / path), path


def test_a_swapped_question_has_another_s_image_and_its_own_answer(folder: Path) -> None:
    asked, astray = records(folder, "eval"), records(folder, "swapped")
    assert [line["label"] for line in astray] == [line["label"] for line in asked]
    assert [line["prompt"] for line in astray] == [line["prompt"] for line in asked]
    images = [line["images"] for line in asked]
    assert [line["images"] for line in astray] == images[1:] + images[:1]


def test_answers_are_equally_frequent_and_no_image_comes_twice(folder: Path) -> None:
    seen = set()
    for name, size in SIZES.items():
        found = records(folder, name)
        assert Counter(record["label"] for record in found) == dict.fromkeys("01234", size // 5)
        seen |= {(folder / record["images"][0]).read_bytes() for record in found}
    assert len(seen) == sum(SIZES.values())


def test_the_same_seed_gives_the_same_files_and_another_does_not(tmp_path: Path) -> None:
    made = []
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        make_data.write(tmp_path / name, seed=seed, sizes={"eval": 10})
        files = sorted((tmp_path / name).rglob("*.*"))
        made.append([file.read_bytes() for file in files])
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize("name", ["grpo", "recipes/shapes", "recipes/shapes_ppo"])
def test_its_runs_can_start(name: str) -> None:
    config = load(ROOT / f"examples/shapes/{name}.yaml")
    assert violations(config, 4, data=False) == []
    assert list(config.data.held_out) == ["held_out", "swapped"], (
        "demo.py and the table ask for these"
    )


def test_a_question_fits_the_model_and_a_swapped_one_has_the_next_image(folder: Path) -> None:
    config = load(ROOT / "examples/shapes/grpo.yaml")
    warm_start.save_processing(folder / "model")
    examples = warm_start.read(folder / "eval.jsonl", folder / "model")
    encode = warm_start.tokenizer()
    for example, record in zip(examples, records(folder, "eval"), strict=True):
        shown = "<|vision_start|>" + "<|image_pad|>" * 9 + "<|vision_end|>"
        assert encode.decode(example.tokens) == record["prompt"].replace("<image>", shown)
        assert encode.decode(example.answer) == record["label"] + "<eos>"
        assert example.grid.tolist() == [[1, 6, 6]] and len(example.patches) == 36
        assert len(example.tokens) <= config.rollout.max_prompt_tokens
        assert len(example.answer) == config.rollout.max_response_tokens
    for number, example in enumerate(warm_start.swapped(examples)):
        after = examples[(number + 1) % len(examples)]
        assert example.tokens == examples[number].tokens
        assert example.answer == examples[number].answer
        assert example.patches.equal(after.patches)
