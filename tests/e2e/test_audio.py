"""Runs on waveforms, from the command line."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from safetensors.torch import load_file

from rftmega.data.media.files import digest_of
from tests.e2e.conftest import Run, numbers_of, several_runs
from tests.tiny_audio import RATE, save_tiny_audio


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2-Audio, ten prompts of 0, 1 and 2 waveforms, and run.yaml."""
    folder = tmp_path_factory.mktemp("audio")
    save_tiny_audio(folder / "model")
    drawn = np.random.default_rng(3)
    (folder / "sounds").mkdir()
    records = []
    for number in range(10):
        names = [f"sounds/{number}-{place}.flac" for place in range(number % 3)]
        for place, name in enumerate(names):
            noise = drawn.uniform(-1, 1, 4000 + 2000 * place)
            soundfile.write(folder / name, noise, RATE)
        question = "<audio>" * len(names) + f"how many {number}?"
        records.append({"prompt": question, "label": str(number), "audio": names})
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


@pytest.mark.ranks
def test_a_resumed_run_on_waveforms_gives_the_numbers_and_weights_of_one_that_was_not_ended(
    world: Path, tmp_path: Path
) -> None:
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    runs = [
        [
            str(world / "run.yaml"), f"trainer.output={output}", f"trainer.steps={steps}", "--processes", "2",
            "parallel.pipeline=2", "checkpoint.every=1", "trainer.export=true", "algorithm.replay.max_age=2",
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
    moved = {name for name, tensor in weights.items() if not tensor.equal(before[name])}
    for part in ("audio_tower.layers.1.", "multi_modal_projector.", "language_model.model."):
        assert any(name.startswith(part) for name in moved), part
    assert "audio_tower.embed_positions.weight" not in moved
    assert heard_in(whole) >= 2


def heard_in(output: Path) -> int:
    """Counts the waveforms in the lines of trajectories, each with its file's digest."""
    found = 0
    for file in sorted((output / "trajectories").rglob("*.gz")):
        for line in gzip.decompress(file.read_bytes()).splitlines():
            for waveform in json.loads(line).get("images", []):
                assert waveform["digest"] == digest_of(Path(waveform["path"]).read_bytes())
                assert waveform["frames"] in (25, 38)
                found += 1
    return found


@pytest.mark.ranks
def test_a_waveform_too_many_is_one_clear_error(world: Path, tmp_path: Path, train: Run) -> None:
    given = ["rollout.max_images=1", f"trainer.output={tmp_path}"]
    done = train(world / "run.yaml", *given, timeout=120)
    assert done.returncode == 2
    assert "a prompt with 2 waveforms: rollout.max_images is 1" in done.stderr
    assert "Traceback" not in done.stderr
