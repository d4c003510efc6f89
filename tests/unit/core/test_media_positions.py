"""Images and videos among tokens: positions are transformers', and a shared image is fed once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rftmega.core.media_positions import Frames, PlacedImage, RowImages, unexpanded
from rftmega.data.media.model_inputs import image_positions, image_tensors
from tests.tiny_vision import IMAGE, KINDS, MERGE, VIDEO, save_tiny_vision
from tests.video_rows import LONG_ROWS, rows_with_videos, video_rows
from tests.vision_rows import inputs_of, rows_with_images, vision_rows


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, kind)
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    tokens, placed = vision_rows(tmp_path)
    longest = max(map(len, tokens))
    fed = image_tensors(RowImages.of(placed), len(tokens), longest, merge=MERGE, load=None)
    for row, (ids, own) in enumerate(zip(tokens, placed, strict=True)):
        ids_of = torch.tensor([ids])
        grids = torch.tensor([image.grid for image in own]) if own else None
        wanted, _ = model.model.get_rope_index(
            ids_of, mm_token_type_ids=(ids_of == IMAGE).int(), image_grid_thw=grids
        )
        assert torch.equal(fed.positions[row, : len(ids)].T, wanted[:, 0])


def test_a_image_of_several_rows_is_loaded_once_and_stands_in_all_of_them(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, "qwen2_vl")
    rows = rows_with_images(tmp_path)
    assert rows.images is not None
    loaded = []

    def load(image: Any) -> torch.Tensor:
        loaded.append(image.digest)
        return image.source  # type: ignore[no-any-return]

    fed = image_tensors(rows.images, len(rows), rows.tokens.shape[1], merge=MERGE, load=load)
    assert len(loaded) == len(set(loaded)) == 3
    assert fed.pixels is not None
    assert fed.grids is not None
    assert len(fed.pixels) == int(fed.grids.prod(1).sum())
    sizes = (fed.grids.prod(1) // MERGE**2).tolist()
    starts = dict(zip(loaded, [1, 1 + sizes[0], 1 + sizes[0] + sizes[1]], strict=True))
    for row, own in enumerate(rows.images.rows):
        assert torch.equal(fed.features[row] > 0, rows.tokens[row] == IMAGE)
        for image in own:
            begin = starts[image.digest]
            wanted = torch.arange(begin, begin + image.tokens)
            assert torch.equal(fed.features[row, image.start : image.end], wanted)


def test_one_placeholder_is_left_of_each_image(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, "qwen2_vl")
    tokens, placed = vision_rows(tmp_path)
    for ids, own in zip(tokens, placed, strict=True):
        short = unexpanded(ids, own)
        assert short.count(IMAGE) == len(own)
        assert [token for token in short if token != IMAGE] == [t for t in ids if t != IMAGE]


def test_images_go_with_their_rows(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, "qwen2_vl")
    rows = rows_with_images(tmp_path)
    assert rows.images is not None
    index = torch.tensor([3, 1])
    for batch in (rows, rows.ragged()):
        chosen = batch.select(index)
        assert chosen.images is not None
        assert chosen.images.rows == (rows.images.rows[3], ())
        assert batch.select(torch.tensor([1])).images is None, "it has none"
    joined = RowImages.join([chosen.images, None], [2, 1])
    assert joined is not None
    assert joined.rows == (*chosen.images.rows, ())
    assert RowImages.join([None, None], [2, 1]) is None
    again = RowImages.from_state(rows.images.state())
    assert again == rows.images
    assert torch.equal(again.rows[0][0].source, rows.images.rows[0][0].source)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_rows_with_videos_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, kind)
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    tokens, placed = video_rows(tmp_path)
    for ids, own in zip(tokens, placed, strict=True):
        given = inputs_of(ids, own)
        for name in ("pixel_values", "pixel_values_videos"):
            given.pop(name, None)
        wanted, _ = model.model.get_rope_index(**given)
        assert torch.equal(image_positions(own, len(ids), merge=MERGE).T, wanted[:, 0])


def test_words_behind_a_long_video_go_on_behind_its_last_time() -> None:
    # 3 times of 1 x 2 features, 1.5 apart, behind one word, and two words behind them. As in vLLM
    # and in Qwen2-VL's paper; transformers 5.19 would give these 3 and 4.
    frames = Frames((0, 1, 2, 3, 4), 5, 2.0, 1.5, (0,), 6)
    video = PlacedImage("", "a", (3, 2, 4), 1, 6, frames)
    found = image_positions((video,), 9, merge=2)
    assert found[:, 0].tolist() == [0, 1, 1, 2, 2, 4, 4, 5, 6]
    assert found[:, 1].tolist() == [0, 1, 1, 1, 1, 1, 1, 5, 6]
    assert found[:, 2].tolist() == [0, 1, 2, 1, 2, 1, 2, 5, 6]


@pytest.mark.parametrize("kind", KINDS)
def test_features_stand_where_a_video_s_placeholders_do(kind: str, tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, kind)
    rows = rows_with_videos(tmp_path)
    assert rows.images is not None
    fed = image_tensors(
        rows.images, len(rows), rows.tokens.shape[1], merge=MERGE, load=lambda each: each.source
    )
    here = (rows.tokens == IMAGE) | (rows.tokens == VIDEO)
    assert torch.equal(fed.features > 0, here)
    assert fed.pixels is not None
    assert fed.features.max() == len(fed.pixels) // MERGE**2, "every feature stands somewhere"
    for row, own in enumerate(rows.images.rows):
        for each in own:
            places = fed.features[row, each.start : each.end]
            places = places[places > 0]
            assert torch.equal(places, torch.arange(len(places)) + places[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_video_is_left_one_placeholder_and_kept_as_it_was(kind: str, tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, kind)
    tokens, placed = video_rows(tmp_path, LONG_ROWS)
    for ids, own in zip(tokens, placed, strict=True):
        plain = unexpanded(ids, own)
        films = [each for each in own if each.frames is not None]
        assert plain.count(VIDEO) == len(films)
        assert len(plain) == len(ids) - sum(each.tokens - 1 for each in own)
        assert ord("<") - 24 not in plain, "times in words go, too"
    held = RowImages.of(placed)
    assert held is not None
    assert RowImages.from_state(held.state()) == held
