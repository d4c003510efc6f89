"""The grid, which is known without decoding, and the patches are those of transformers."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor

from rftmega.core.errors import CheckpointError, DataError
from rftmega.core.media_positions import PlacedImage
from rftmega.data.media import image_processor
from rftmega.data.media.files import digest_of
from rftmega.data.media.image_processor import ImageProcessor, processor_of
from rftmega.data.media.videos import Video, chosen_frames
from tests.tiny_models import save_tiny
from tests.tiny_vision import FILM, IMAGE, IMAGE_TEXT, KINDS, save_tiny_vision

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
    image = drawn(width, height)
    file = io.BytesIO()
    image.save(file, format="PNG")
    made = theirs(text=f"a{IMAGE_TEXT}b", images=[image], return_tensors="pt")
    ours = ImageProcessor(folder)
    grid = ours.grid_of(width, height)
    assert list(grid) == made["image_grid_thw"][0].tolist()
    assert ours.tokens_of(grid) == int((made["input_ids"] == IMAGE).sum())
    assert torch.equal(ours.pixels(placed(file.getvalue())), made["pixel_values"])
    assert ours.placeholder == IMAGE


def placed(source: str | bytes | torch.Tensor, digest: str = "") -> PlacedImage:
    """An image of which only the file counts."""
    if isinstance(source, bytes):
        digest = digest_of(source)
    return PlacedImage(source, digest, (1, 2, 2), 0, 1)


@pytest.mark.parametrize("frames", [2, 5, 8])
@pytest.mark.parametrize(("width", "height"), [(96, 64), (31, 29), (640, 480), (97, 500)])
def test_grid_tokens_and_patches_of_a_video_are_those_of_transformers(
    folder: Path, width: int, height: int, frames: int
) -> None:
    theirs: Any = AutoProcessor.from_pretrained(folder, backend="torchvision")
    film = np.random.default_rng(frames).integers(
        0, 256, (frames, height, width, 3), dtype=np.uint8
    )
    video = Video(29, 7.5, width, height)
    chosen = chosen_frames(video, 99.0, frames)
    about = {"total_num_frames": 29, "fps": 7.5, "frames_indices": list(chosen)}
    made = theirs(
        text=f"a{FILM}b",
        videos=[film],
        video_metadata=[about],
        do_sample_frames=False,
        return_tensors="pt",
    )
    ours = ImageProcessor(folder)
    grid = ours.video_grid_of(video, frames)
    assert list(grid) == made["video_grid_thw"][0].tolist()
    tokens, shown = ours.placed_video(
        grid, video, chosen, lambda text: theirs.tokenizer.encode(text)
    )
    assert [*made["input_ids"][0].tolist()[2:-2]] == tokens
    assert torch.equal(ours.video_patches_of(film), made["pixel_values_videos"])
    if "second_per_grid_ts" in made:
        assert shown.step == 4 * float(made["second_per_grid_ts"][0])
    runs = [tokens[start : start + shown.length] for start in shown.starts]
    assert sum(map(len, runs)) == tokens.count(ours.video_placeholder)
    assert all(set(run) == {ours.video_placeholder} for run in runs)


def test_a_strip_of_a_video_is_refused_and_so_is_a_scaling_that_is_unknown(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="a video of 2000 x 3 pixels can't be used"):
        ImageProcessor(folder).video_grid_of(Video(9, 1.0, 2000, 3), 4)
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    fields = json.loads((folder / "preprocessor_config.json").read_text())
    fields["cap_pixels_per_frame"] = True
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="cap_pixels_per_frame"):
        ImageProcessor(tmp_path).video_grid_of(Video(9, 1.0, 64, 64), 4)


def test_a_strip_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="2000 x 3 pixels can't be used"):
        ImageProcessor(folder).grid_of(2000, 3)


def test_patches_are_kept_up_to_a_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ImageProcessor(folder)
    contents = []
    for width in (40, 50, 60):
        file = io.BytesIO()
        drawn(width, 50).save(file, format="PNG")
        contents.append(file.getvalue())
    first = ours.pixels(placed(contents[0]))
    assert ours.pixels(placed(contents[0])) is first
    monkeypatch.setattr("rftmega.data.media.image_processor.KEPT", first.nbytes)
    ours.pixels(placed(contents[1]))
    ours.pixels(placed(contents[2]))
    assert ours.pixels(placed(contents[0])) is not first
    assert torch.equal(ours.pixels(placed(contents[0])), first)


def test_a_image_with_its_digest_is_read_once_and_must_not_have_changed(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    drawn(40, 50).save(path)
    digest = digest_of(path.read_bytes())
    ours = ImageProcessor(folder)
    first = ours.pixels(placed(str(path), digest))
    path.unlink()
    assert ours.pixels(placed(str(path), digest)) is first
    drawn(41, 50).save(path)
    with pytest.raises(DataError, match="has changed"):
        ImageProcessor(folder).pixels(placed(str(path), digest))


def test_patches_are_returned_as_they_are(folder: Path) -> None:
    patches = torch.zeros(4, 7)
    assert ImageProcessor(folder).pixels(placed(patches)) is patches


def with_fields(folder: Path, target: Path, name: str, **fields: Any) -> Path:
    """The files that a processor reads, one of them with other fields; None: without."""
    for file in ("config.json", "preprocessor_config.json"):
        content = json.loads((folder / file).read_text())
        if file == name:
            content = {key: x for key, x in (content | fields).items() if x is not None}
        (target / file).write_text(json.dumps(content))
    return target


@pytest.mark.parametrize(
    "fields",
    [
        {"size": None, "min_pixels": 3136, "max_pixels": 50176},  # Qwen2-VL, Qwen2.5-VL
        {"image_processor_type": "Qwen2VLImageProcessorFast"},  # Qwen3-VL
    ],
)
def test_a_file_as_it_was_published_is_read_as_transformers_does(
    folder: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    with_fields(folder, tmp_path, "preprocessor_config.json", **fields)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="torchvision")
    made = theirs(images=[drawn(400, 300)], return_tensors="pt")
    assert [list(ImageProcessor(tmp_path).grid_of(400, 300))] == made["image_grid_thw"].tolist()


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("preprocessor_config.json", {"patch_size": 8}, "patch_size=8, but config.json says"),
        ("preprocessor_config.json", {"merge_size": 1}, "merge_size=1, but config.json says"),
        ("preprocessor_config.json", {"do_resize": False}, "with do_resize=False is not known"),
        (
            "preprocessor_config.json",
            {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}},
            "ViTImageProcessor.* is not known",
        ),
        ("preprocessor_config.json", {"size": "large"}, "can't be used"),
        ("config.json", {"image_token_id": None}, "image_token_id=None is no token's id"),
    ],
)
def test_a_folder_whose_images_its_model_can_t_be_fed_is_refused(
    folder: Path, tmp_path: Path, file: str, fields: dict[str, Any], said: str
) -> None:
    with_fields(folder, tmp_path, file, **fields)
    with pytest.raises(CheckpointError, match=said):
        ImageProcessor(tmp_path)


def test_a_model_of_words_has_no_processor_and_a_folder_must_say_how_images_are_fed(
    folder: Path, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "words", "qwen3")
    assert processor_of(tmp_path / "words") is None
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match="holds no preprocessor_config.json"):
        processor_of(tmp_path)


def files(folder: Path, number: int) -> list[PlacedImage]:
    found = []
    for width in range(40, 40 + number):
        drawn(width, 50).save(folder / f"{width}.png")
        found.append(placed((folder / f"{width}.png").read_bytes()))
        found[-1] = replace(found[-1], source=str(folder / f"{width}.png"))
    return found


def test_images_that_come_are_read_ahead_a_few_at_a_time_and_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming = files(tmp_path, 5)
    wanted = [ImageProcessor(folder).pixels(each) for each in coming]
    seen: list[str] = []
    reading = image_processor.read_image
    monkeypatch.setattr(
        image_processor,
        "read_image",
        lambda path, digest: seen.append(path) or reading(path, digest),
    )
    monkeypatch.setattr(image_processor, "AHEAD", 2)
    ours = ImageProcessor(folder)
    ours.read_ahead([*coming, coming[0], placed(torch.zeros(4, 7))])
    for number, (each, patches) in enumerate(zip(coming, wanted, strict=True)):
        assert len(seen) <= number + 2
        assert torch.equal(ours.pixels(each), patches)
    assert sorted(seen) == sorted(str(each.source) for each in coming)


def test_a_image_that_can_not_be_read_ahead_is_told_where_it_is_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    good, gone, unasked = files(tmp_path, 3)
    Path(str(gone.source)).unlink()
    ours = ImageProcessor(folder)
    ours.read_ahead([gone, unasked])
    ours.read_ahead([good, gone])
    ours.pixels(good)
    with pytest.raises(DataError, match="41.png can't be read"):
        ours.pixels(gone)
    assert unasked.digest not in ours._reading
