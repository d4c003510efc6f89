"""Runs on videos, from the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.e2e.conftest import Run
from tests.tiny_vision import save_tiny_vision
from tests.unit.data.media.test_videos import drawn, written


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL, prompts with a video, with an image, with both and with none, and run.yaml."""
    folder = tmp_path_factory.mktemp("videos")
    save_tiny_vision(folder / "model", "qwen3_vl")
    noise = np.random.default_rng(3)
    records = []
    for number in range(8):
        written(folder / f"{number}.avi", drawn(8 + number))
        Image.fromarray(noise.integers(0, 256, (50, 60, 3), dtype=np.uint8)).save(
            folder / f"{number}.png"
        )
        videos, images = [f"{number}.avi"] * (number % 2), [f"{number}.png"] * (number // 2 % 2)
        question = "<video>" * len(videos) + "<image>" * len(images) + f"how many {number}?"
        records.append(
            {"prompt": question, "label": str(number), "images": images, "videos": videos}
        )
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    (folder / "run.yaml").write_text(f"""
model: {{path: {folder / "model"}}}
data: {{train: {folder / "train.jsonl"}, video_fps: 5, video_frames: 4}}
rollout: {{engine: vllm, samples_per_prompt: 2, max_prompt_tokens: 100, max_response_tokens: 4, max_videos: 1, max_batch: 8, cpu_cache_gib: 0.05}}
optimizer: {{learning_rate: 1.0e-3, epsilon: 1.0e-4}}
reward: {{exact_match: 0, format: 1, format_pattern: ".*[aeiou0-4].*"}}
trainer: {{prompts_per_step: 4, max_tokens_per_micro_batch: 120, output: {folder / "out"}}}
""")  # noqa: E501
    return folder


@pytest.mark.ranks
def test_a_run_on_videos_learns_and_is_gone_on_with(world: Path, train: Run) -> None:
    for steps in (2, 3):
        done = train(
            world / "run.yaml",
            f"trainer.steps={steps}",
            "checkpoint.every=1",
            "algorithm.replay.max_age=2",
            "algorithm.importance_sampling=token",
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    metrics = map(json.loads, (world / "out/metrics.jsonl").read_text().splitlines())
    gaps = [step["logprob_gap_max"] for step in metrics if "logprob_gap_max" in step]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["rollout.max_videos=0", "data.video_fps=2", "data.video_frames=32"],
            "rollout.max_videos is 0",
        ),
        (["rollout.max_videos=0"], "data.video_frames=4 is read where prompts may have videos"),
        (["rollout.max_prompt_tokens=40"], "lower data.video_frames"),
    ],
)
def test_what_can_t_be_is_one_clear_error(
    options: list[str], said: str, world: Path, tmp_path: Path, train: Run
) -> None:
    done = train(world / "run.yaml", *options, f"trainer.output={tmp_path}", timeout=120)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
