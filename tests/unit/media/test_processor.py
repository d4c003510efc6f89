"""The grid, which is known without decoding, and the patches are those of transformers."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from rftmega.errors import CheckpointError, DataError
from rftmega.media.processor import PictureProcessor, processor_of
from tests.tiny_models import save_tiny
from tests.tiny_vision import IMAGE, KINDS, PICTURE, save_tiny_vision

SIZES = ((1, 1), (30, 30), (31, 29), (200, 1), (640, 480), (97, 1013), (2000, 500))


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(tmp_path_factory.mktemp(request.param), request.param)


def drawn(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_grid_tokens_and_patches_are_those_of_transformers(
    folder: Path, width: int, height: int
) -> None:
    theirs: Any = AutoProcessor.from_pretrained(folder, backend="torchvision")
    picture = drawn(width, height)
    file = io.BytesIO()
    picture.save(file, format="PNG")
    made = theirs(text=f"a{PICTURE}b", images=[picture], return_tensors="pt")
    ours = PictureProcessor(folder)
    grid = ours.grid_of(width, height)
    assert list(grid) == made["image_grid_thw"][0].tolist()
    assert ours.tokens_of(grid) == int((made["input_ids"] == IMAGE).sum())
    assert torch.equal(ours.pixels(file.getvalue()), made["pixel_values"])
    assert ours.placeholder == IMAGE


def test_a_strip_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="2000 x 3 pixels can't be used"):
        PictureProcessor(folder).grid_of(2000, 3)


def test_patches_are_kept_up_to_a_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = PictureProcessor(folder)
    contents = []
    for width in (40, 50, 60):
        file = io.BytesIO()
        drawn(width, 50).save(file, format="PNG")
        contents.append(file.getvalue())
    first = ours.pixels(contents[0])
    assert ours.pixels(contents[0]) is first
    monkeypatch.setattr("rftmega.media.processor.KEPT", first.nbytes)
    ours.pixels(contents[1])
    ours.pixels(contents[2])
    assert ours.pixels(contents[0]) is not first
    assert torch.equal(ours.pixels(contents[0]), first)


def test_a_model_of_words_has_no_processor_and_a_folder_must_say_how_pictures_are_fed(
    folder: Path, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "words", "qwen3")
    assert processor_of(tmp_path / "words") is None
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match="holds no preprocessor_config.json"):
        processor_of(tmp_path)
