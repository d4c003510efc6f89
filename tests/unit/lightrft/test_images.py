"""Images as LightRFT's users give them, among the tokens of a tiny model that sees."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.core.media_positions import RowImages
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.data.prompt_images import Most
from rftmega.lightrft.image_inputs import ImageInputs, Patches
from rftmega.lightrft.padded_experience import (
    Samples,
    of_experience,
    to_experience,
    with_patches,
)
from tests.tiny_vision import (
    IMAGE,
    KINDS,
    VIDEO,
    images,
    preprocessor,
    save_tiny_vision,
    tokenizer,
    vision_config,
)
from tests.unit.data.media.test_videos import drawn, saved
from tests.video_rows import rows_with_videos
from tests.vision_rows import experience_of, rows_with_images

KIND = "qwen2_5_vl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder without weights."""
    made = tmp_path_factory.mktemp("model")
    vision_config(KIND).save_pretrained(made)
    (made / "preprocessor_config.json").write_text(json.dumps(preprocessor(KIND)))
    return made


@pytest.fixture(scope="module")
def inputs(folder: Path) -> ImageInputs:
    return ImageInputs(ImageProcessor(folder), encode, most=Most(3, 1))


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text)
    return ids


def test_pil_s_paths_bytes_and_base64_say_the_same(
    inputs: ImageInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images()[0].save(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    content = (tmp_path / "a.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    found = inputs.read([str(tmp_path / "a.png"), "a.png", content, url, images()[0]])
    assert len({each.grid for each in found}) == 1
    assert len({each.digest for each in found[:4]}) == 1
    assert [each.source for each in found[:2]] == [str(tmp_path / "a.png")] * 2
    assert found[2].source == found[3].source == content
    with pytest.raises(DataError, match="is not fetched"):
        inputs.read(["https://x/y.png"])


def test_one_placeholder_and_one_a_feature_become_the_same_prompt(inputs: ImageInputs) -> None:
    drawn = images()
    ids, placed = inputs.prompt("a<image>b<image>", drawn[:2])
    assert inputs.prompt(ids, drawn[:2]) == (ids, placed)
    assert [ids[each.start : each.end] for each in placed] == [
        (IMAGE,) * each.tokens for each in placed
    ]
    assert ids.count(IMAGE) == sum(each.tokens for each in placed)


def test_places_and_images_that_don_t_add_up_are_refused(inputs: ImageInputs) -> None:
    drawn = images()
    with pytest.raises(DataError, match=r"1 placeholder\(s\) .* for 2 image\(s\)"):
        inputs.prompt("a<image>", drawn[:2])
    with pytest.raises(DataError, match=r"1 placeholder\(s\) .* for 0 image\(s\)"):
        inputs.prompt("a<image>", [])
    with pytest.raises(DataError, match=r"with 4 images: rollout.max_images is 3"):
        inputs.prompt("<image>" * 4, drawn[:1] * 4)
    ids, placed = inputs.prompt("a<image>b", drawn[:1])
    torn = list(ids)
    torn.insert(placed[0].start + 1, 50)
    with pytest.raises(DataError, match="torn apart at token 2"):
        inputs.prompt(torn, drawn[:1])


def of_all(folder: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Rows with their images, and the patches of these."""
    rows = rows_with_images(folder)
    patches = Patches.of(rows.images, None)
    assert patches.pixel_values is not None
    assert patches.image_grid_thw is not None
    return rows, patches.pixel_values, patches.image_grid_thw


def test_patches_find_the_rows_and_places_that_they_were_taken_from(
    inputs: ImageInputs, folder: Path
) -> None:
    rows, pixel_values, grids = of_all(folder)
    found = inputs.of_rows(rows, Patches(pixel_values, grids))
    assert found is not None
    for row, wanted in zip(found.rows, rows.images.rows, strict=True):
        assert [(p.grid, p.start, p.tokens) for p in row] == [
            (p.grid, p.start, p.tokens) for p in wanted
        ]
        for mine, theirs in zip(row, wanted, strict=True):
            assert torch.equal(mine.source, theirs.source)
    assert len(found.distinct) == 3, "an image that rows share is fed once"


def test_patches_that_rows_have_no_places_for_are_refused(
    inputs: ImageInputs, folder: Path
) -> None:
    rows, pixel_values, grids = of_all(folder)
    with pytest.raises(ValueError, match="image_grid_thw asks for"):
        inputs.of_rows(rows, Patches(pixel_values[1:], grids))
    size = int(grids[-1].prod())
    with pytest.raises(ValueError, match="row 5 has .* don't fill"):
        inputs.of_rows(rows, Patches(pixel_values[:-size], grids[:-1]))
    more = torch.cat([pixel_values, pixel_values[-size:]]), torch.cat([grids, grids[-1:]])
    with pytest.raises(ValueError, match=r"1 image\(s\) more than the rows have places for"):
        inputs.of_rows(rows, Patches(*more))
    blind = replace(rows, images=None)
    with pytest.raises(ValueError, match="the model's processor"):
        with_patches(blind, Patches(pixel_values, grids), None)


def test_an_experience_goes_there_and_back_with_its_patches(
    inputs: ImageInputs, folder: Path
) -> None:
    own = experience_of(rows_with_images(folder))
    canvas = of_experience(own)
    assert canvas.image_grid_thw is not None
    assert canvas.pixel_values is not None
    assert len(canvas.pixel_values) == int(canvas.image_grid_thw.prod(-1).sum())
    assert to_experience(canvas).images == own.images
    canvas.images = None  # as somebody else's experience
    found = to_experience(canvas, inputs.processor).images
    assert isinstance(found, RowImages)
    assert found.patches == own.images.patches
    with pytest.raises(ValueError, match="the model's processor"):
        to_experience(canvas)


def test_samples_keep_their_images_packed_and_batched(folder: Path) -> None:
    rows = rows_with_images(folder)
    samples = Samples.of(rows, prompts=[], labels=[])
    assert samples.rows().images == rows.images
    assert samples.packed().rows().images == rows.images
    assert samples.packed().batched().images == rows.images


def films(folder: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Rows with their images and videos, and the patches of the videos."""
    rows = rows_with_videos(folder)
    patches = Patches.of(rows.images, None)
    assert patches.pixel_values_videos is not None
    assert patches.video_grid_thw is not None
    return rows, patches.pixel_values_videos, patches.video_grid_thw


@pytest.mark.parametrize("kind", KINDS)
def test_patches_of_videos_find_the_places_that_they_were_taken_from(
    kind: str, tmp_path: Path
) -> None:
    save_tiny_vision(tmp_path, kind)
    own = ImageInputs(ImageProcessor(tmp_path))
    rows = rows_with_videos(tmp_path)
    patches = Patches.of(rows.images, None)
    found = own.of_rows(rows, patches)
    assert found is not None
    for row, wanted in zip(found.rows, rows.images.rows, strict=True):
        for mine, theirs in zip(row, wanted, strict=True):
            assert (mine.grid, mine.runs) == (theirs.grid, theirs.runs)
            assert torch.equal(mine.source, theirs.source)


def test_patches_of_videos_that_don_t_add_up_are_refused(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, KIND)
    own = ImageInputs(ImageProcessor(tmp_path))
    rows, values, grids = films(tmp_path)
    drawn = Patches.of(rows.images, None)
    both = drawn.pixel_values, drawn.image_grid_thw
    with pytest.raises(ValueError, match="pixel_values_videos needs video_grid_thw"):
        own.of_rows(rows, Patches(*both, values))
    size = int(grids[-1].prod())
    with pytest.raises(ValueError, match="row 4 has .* don't fill"):
        own.of_rows(rows, Patches(*both, values[:-size], grids[:-1]))
    torn = replace(rows, tokens=rows.tokens.clone())
    first = int((rows.tokens[0] == VIDEO).nonzero()[1])
    torn.tokens[0, [first, first - 2]] = torn.tokens[0, [first - 2, first]]
    with pytest.raises(ValueError, match="torn apart"):
        own.of_rows(torn, Patches(*both, values, grids))


def test_paths_frames_and_tensors_of_a_video_say_the_same(
    inputs: ImageInputs, tmp_path: Path
) -> None:
    shown = drawn()
    frames = [Image.fromarray(frame) for frame in shown]
    tensor = torch.from_numpy(shown).permute(0, 3, 1, 2)
    saved(tmp_path / "a", shown)
    options = DataConfig(video_fps=2.0, video_frames=len(shown))
    own = ImageInputs(inputs.processor, encode, options=options)
    found = own.read_videos([str(tmp_path / "a"), frames, tensor, shown])
    assert {each.frames for each in found} == {found[0].frames}
    assert {each.tokens for each in found} == {found[0].tokens}
    patches = [own.processor.pixels(each.at(0)) for each in found]
    assert all(torch.equal(each, patches[0]) for each in patches)
    for wrong, why in (
        ([1, 2], "frames"),
        (frames[:1], "at least 2"),
        (torch.zeros(3, 8, 8), "is one"),
        (str(tmp_path / "none.mp4"), "can't be read"),
        ([shown[0], shown[1, 1:]], "one size"),
    ):
        with pytest.raises(DataError, match=why):
            own.read_videos([wrong])


@pytest.mark.parametrize("kind", KINDS)
def test_one_placeholder_and_what_stands_in_a_video_s_place_become_the_same_prompt(
    kind: str, tmp_path: Path
) -> None:
    save_tiny_vision(tmp_path, kind)
    own = ImageInputs(ImageProcessor(tmp_path), encode, most=Most(1, 2))
    given = "a<image>b<video>c<video>", images()[:1], [drawn(4), drawn(6)]
    ids, placed = own.prompt(*given)
    assert own.prompt(ids, *given[1:]) == (ids, placed)
    assert [each.frames is None for each in placed] == [True, False, False]
    for each in placed[1:]:
        assert all(ids[begin] == VIDEO for begin, _ in each.runs)
    assert ids.count(VIDEO) == sum(each.features for each in placed[1:])
    with pytest.raises(DataError, match="rollout.max_videos is 2"):
        own.prompt("<video>" * 3, [], [drawn(4)] * 3)
    with pytest.raises(DataError, match=r"2 placeholder\(s\) .* for 1 video\(s\)"):
        own.prompt("<video><video>", [], [drawn(4)])
