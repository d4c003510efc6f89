"""Runs on images, from the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.e2e.conftest import Run, numbers_of, several_runs
from tests.tiny_vision import save_tiny_vision


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


def written(folder: Path, kind: str) -> Path:
    """A tiny model, ten prompts of 0, 1 and 2 images, and run.yaml."""
    save_tiny_vision(folder / "model", kind)
    drawn = np.random.default_rng(3)
    (folder / "images").mkdir()
    records = []
    for number in range(10):
        names = [f"images/{number}-{place}.png" for place in range(number % 3)]
        for place, name in enumerate(names):
            noise = drawn.integers(0, 256, (40 + 20 * place, 60, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / name)
        question = "<image>" * len(names) + f"how many {number}?"
        records.append({"prompt": question, "label": str(number), "images": names})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    (folder / "run.yaml").write_text(f"""
model: {{path: {folder / "model"}}}
data: {{train: {folder / "train.jsonl"}}}
rollout: {{engine: transformers, samples_per_prompt: 2, max_prompt_tokens: 48, max_response_tokens: 4}}
optimizer: {{learning_rate: 1.0e-3, epsilon: 1.0e-4}}
reward: {{exact_match: 0, format: 1, format_pattern: ".*[aeiou0-4].*"}}
trainer: {{steps: 3, prompts_per_step: 4, max_tokens_per_micro_batch: 120, output: {folder / "out"}}}
""")
    return folder


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("qwen2_5_vl", "parallel.pipeline=2", marks=pytest.mark.ranks),
        pytest.param("qwen3_vl_moe", "parallel.expert=2", marks=pytest.mark.ranks),
    ],
)
def test_a_resumed_run_on_images_gives_the_numbers_and_weights_of_one_that_was_not_ended(
    kind: str, layout: str, tmp_path: Path
) -> None:
    (tmp_path / "world").mkdir()
    world = written(tmp_path / "world", kind)
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    runs = [
        [
            str(world / "run.yaml"), f"trainer.output={output}", f"trainer.steps={steps}", "--processes", "2",
            layout, "checkpoint.every=1", "trainer.export=true", "algorithm.replay.max_age=2",
            "algorithm.importance_sampling=token",
        ]
        for output, steps in ((whole, 4), (ended, 2), (ended, 4))
    ]  # fmt: skip
    done = several_runs(runs)
    assert done.returncode == 0, done.stderr
    assert numbers_of(ended) == numbers_of(whole)
    metrics = map(json.loads, (whole / "metrics.jsonl").read_text().splitlines())
    gaps = [step["logprob_gap_max"] for step in metrics if "logprob_gap_max" in step]
    assert len(gaps) == 4
    assert max(gaps) < 1e-4
    weights, others = (load_file(next(run.glob("policy/*.safetensors"))) for run in (whole, ended))
    assert all(tensor.equal(others[name]) for name, tensor in weights.items())
    before = load_file(world / "model/model.safetensors")
    moved = [name for name, tensor in weights.items() if not tensor.equal(before[name])]
    assert any("visual.blocks." in name for name in moved)
    assert any(".layers." in name for name in moved)


@pytest.mark.ranks
def test_with_two_servers_a_run_on_images_is_that_with_engines_inside(
    world: Path, tmp_path: Path, train: Run
) -> None:
    seen = {}
    for name, options in {
        "separate": ["strategy=separate", "rollout.servers=2"],
        "colocated": [],
    }.items():
        given = ["rollout.engine=vllm", "rollout.cpu_cache_gib=0.05", "--processes", 2]
        output = tmp_path / name
        done = train(world / "run.yaml", *given, *options, f"trainer.output={output}", timeout=400)
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        seen[name] = [step for step in lines if "logprob_gap_max" in step]
    assert len(seen["separate"]) == 3
    for ours, theirs in zip(seen["separate"], seen["colocated"], strict=True):
        assert ours["logprob_gap_max"] < 1e-4
        for metric in ("reward", "loss", "grad_norm"):
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4), (ours["step"], metric)


@pytest.mark.ranks
def test_a_image_too_many_is_one_clear_error(world: Path, tmp_path: Path, train: Run) -> None:
    given = ["rollout.max_images=1", f"trainer.output={tmp_path}"]
    done = train(world / "run.yaml", *given, timeout=120)
    assert done.returncode == 2
    assert "a prompt with 2 images: rollout.max_images is 1" in done.stderr
    assert "Traceback" not in done.stderr
