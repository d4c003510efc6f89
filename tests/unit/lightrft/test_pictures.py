"""Pictures as LightRFT's users give them, among the tokens of a tiny model that sees."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.errors import DataError
from rftmega.lightrft.padded_experience import (
    Samples,
    of_experience,
    to_experience,
    with_patches,
)
from rftmega.lightrft.pictures import PictureInputs, patches_of
from rftmega.media.placed import RowPictures
from rftmega.media.processor import PictureProcessor
from tests.tiny_vision import IMAGE, pictures, preprocessor, tokenizer, vision_config
from tests.vision_rows import experience_of, rows_with_pictures

KIND = "qwen2_5_vl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder without weights."""
    made = tmp_path_factory.mktemp("model")
    vision_config(KIND).save_pretrained(made)
    (made / "preprocessor_config.json").write_text(json.dumps(preprocessor(KIND)))
    return made


@pytest.fixture(scope="module")
def inputs(folder: Path) -> PictureInputs:
    return PictureInputs(PictureProcessor(folder), most=3)


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text)
    return ids


def test_pil_s_paths_bytes_and_base64_say_the_same(
    inputs: PictureInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures()[0].save(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    content = (tmp_path / "a.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    found = inputs.read([str(tmp_path / "a.png"), "a.png", content, url, pictures()[0]])
    assert len({each.grid for each in found}) == 1
    assert len({each.digest for each in found[:4]}) == 1
    assert [each.source for each in found[:2]] == [str(tmp_path / "a.png")] * 2
    assert found[2].source == found[3].source == content
    with pytest.raises(DataError, match="is not fetched"):
        inputs.read(["https://x/y.png"])


def test_one_placeholder_and_one_a_feature_become_the_same_prompt(inputs: PictureInputs) -> None:
    drawn = pictures()
    ids, placed = inputs.prompt("a<image>b<image>", drawn[:2], encode)
    assert inputs.prompt(ids, drawn[:2], encode) == (ids, placed)
    assert [ids[each.start : each.end] for each in placed] == [
        (IMAGE,) * each.tokens for each in placed
    ]
    assert ids.count(IMAGE) == sum(each.tokens for each in placed)


def test_places_and_pictures_that_don_t_add_up_are_refused(inputs: PictureInputs) -> None:
    drawn = pictures()
    with pytest.raises(DataError, match=r"1 placeholder\(s\) .* for 2 picture\(s\)"):
        inputs.prompt("a<image>", drawn[:2], encode)
    with pytest.raises(DataError, match=r"1 placeholder\(s\) .* for 0 picture\(s\)"):
        inputs.prompt("a<image>", [], encode)
    with pytest.raises(DataError, match=r"with 4 pictures: rollout.max_pictures is 3"):
        inputs.prompt("<image>" * 4, drawn[:1] * 4, encode)
    ids, placed = inputs.prompt("a<image>b", drawn[:1], encode)
    torn = list(ids)
    torn.insert(placed[0].start + 1, 50)
    with pytest.raises(DataError, match="torn apart at token 2"):
        inputs.prompt(torn, drawn[:1], encode)


def of_all(folder: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Rows with their pictures, and the patches of these."""
    rows = rows_with_pictures(folder)
    pixel_values, grids = patches_of(rows.pictures, None)
    assert pixel_values is not None
    assert grids is not None
    return rows, pixel_values, grids


def test_patches_find_the_rows_and_places_that_they_were_taken_from(
    inputs: PictureInputs, folder: Path
) -> None:
    rows, pixel_values, grids = of_all(folder)
    found = inputs.of_rows(rows, pixel_values, grids)
    assert found is not None
    for row, wanted in zip(found.rows, rows.pictures.rows, strict=True):
        assert [(p.grid, p.start, p.tokens) for p in row] == [
            (p.grid, p.start, p.tokens) for p in wanted
        ]
        for mine, theirs in zip(row, wanted, strict=True):
            assert torch.equal(mine.source, theirs.source)
    assert len(found.distinct) == 3, "a picture that rows share is fed once"


def test_patches_that_rows_have_no_places_for_are_refused(
    inputs: PictureInputs, folder: Path
) -> None:
    rows, pixel_values, grids = of_all(folder)
    with pytest.raises(ValueError, match="image_grid_thw asks for"):
        inputs.of_rows(rows, pixel_values[1:], grids)
    size = int(grids[-1].prod())
    with pytest.raises(ValueError, match="row 5 has .* don't fill"):
        inputs.of_rows(rows, pixel_values[:-size], grids[:-1])
    more = torch.cat([pixel_values, pixel_values[-size:]]), torch.cat([grids, grids[-1:]])
    with pytest.raises(ValueError, match=r"1 picture\(s\) more than the rows have places for"):
        inputs.of_rows(rows, *more)
    blind = replace(rows, pictures=None)
    with pytest.raises(ValueError, match="the model's processor"):
        with_patches(blind, pixel_values, grids, None)


def test_an_experience_goes_there_and_back_with_its_patches(
    inputs: PictureInputs, folder: Path
) -> None:
    own = experience_of(rows_with_pictures(folder))
    canvas = of_experience(own)
    assert canvas.image_grid_thw is not None
    assert canvas.pixel_values is not None
    assert len(canvas.pixel_values) == int(canvas.image_grid_thw.prod(-1).sum())
    assert to_experience(canvas).pictures == own.pictures
    canvas.pictures = None  # as somebody else's experience
    found = to_experience(canvas, inputs.processor).pictures
    assert isinstance(found, RowPictures)
    assert found.patches == own.pictures.patches
    with pytest.raises(ValueError, match="the model's processor"):
        to_experience(canvas)


def test_samples_keep_their_pictures_packed_and_batched(folder: Path) -> None:
    rows = rows_with_pictures(folder)
    samples = Samples.of(rows, prompts=[], labels=[])
    assert samples.rows().pictures == rows.pictures
    assert samples.packed().rows().pictures == rows.pictures
    assert samples.packed().batched().pictures == rows.pictures
