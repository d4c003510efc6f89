"""Options about images, against a model that sees and one that does not."""

import json
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import load
from rftmega.config.validation.vision import vision


def reasons(folder: Path, fields: dict[str, Any], *options: str) -> list[str]:
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "run.yaml").write_text(f"model: {{path: {folder}}}")
    return vision(load(folder / "run.yaml", list(options)))


SEES = {"model_type": "qwen2_vl", "vision_config": {"spatial_merge_size": 2}}


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("model.dropout=0.1", "the tower has no dropout"),
        ("trainer.max_patches_per_micro_batch=10", "up to 4096 patches"),
        ("optimizer.vision_learning_rate=1", "the tower does not learn"),
    ],
)
def test_what_a_model_that_sees_can_t_have_is_named(option: str, said: str, tmp_path: Path) -> None:
    frozen = "model.freeze_vision=true"
    (found,) = reasons(tmp_path, SEES, option, frozen)
    assert said in found
    assert reasons(tmp_path, SEES, frozen) == []


AUDIO = {"model_type": "qwen2_audio", "audio_config": {"max_source_positions": 1500}}


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("strategy=separate", "servers are asked without waveforms"),
        ("model.dropout=0.1", "the tower has no dropout"),
        (
            "trainer.max_patches_per_micro_batch=11999",
            "max_images=8 waveforms, 1500 positions each",
        ),
        ("optimizer.vision_learning_rate=1", "the tower does not learn"),
        ("rollout.max_videos=1", "rollout.max_videos=1 needs a model that sees"),
        ("data.video_frames=3", "data.video_frames=3 needs a model that sees"),
    ],
)
def test_what_a_model_that_hears_can_t_have_is_named(
    option: str, said: str, tmp_path: Path
) -> None:
    frozen = "model.freeze_vision=true"
    (found,) = reasons(tmp_path, AUDIO, option, frozen)
    assert said in found
    enough = "trainer.max_patches_per_micro_batch=12000"
    assert reasons(tmp_path, AUDIO, frozen, enough, "rollout.max_images=8") == []


def test_vllm_takes_windows_of_30_seconds_only(tmp_path: Path) -> None:
    short = {"model_type": "qwen2_audio", "audio_config": {"max_source_positions": 100}}
    (found,) = reasons(tmp_path, short, "rollout.engine=vllm")
    assert "windows of 1500 positions (30 s), and the model's max_source_positions is 100" in found
    assert reasons(tmp_path, short, "rollout.engine=transformers") == []


def test_servers_take_images_and_a_rate_is_a_share(tmp_path: Path) -> None:
    assert reasons(tmp_path, SEES, "strategy=separate", "rollout.max_videos=2") == []
    rates = ("optimizer.vision_learning_rate=1", "optimizer.learning_rate=0")
    (found,) = reasons(tmp_path, SEES, *rates)
    assert "needs optimizer.learning_rate above 0" in found


@pytest.mark.parametrize(
    "option",
    [
        "model.freeze_vision=true",
        "rollout.max_images=3",
        "data.media_folder=x",
        "optimizer.vision_learning_rate=1",
        "critic.optimizer.vision_learning_rate=1",
        "trainer.max_patches_per_micro_batch=9",
    ],
)
def test_a_model_of_words_has_no_such_option(option: str, tmp_path: Path) -> None:
    found = reasons(tmp_path, {"model_type": "qwen3"}, option)
    assert any(option.partition("=")[0] in each for each in found)


def test_a_folder_that_others_refuse_is_left_to_them(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"model: {{path: {tmp_path / 'nowhere'}}}")
    assert vision(load(tmp_path / "run.yaml", ["rollout.max_images=3"])) == []
