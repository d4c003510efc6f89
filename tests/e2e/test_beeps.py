"""The data of examples/beeps are what they say, fit its model and its grpo.yaml, and are learnt from."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile

from examples.beeps import make_data, warm_start
from rftmega.config import load
from rftmega.config.validation import violations
from rftmega.data.media.audio_processor import audio_processor_of
from tests.e2e.conftest import ROOT

SIZES = {"eval": 20, "warm_start": 40, "train": 40}
Record = dict[str, str | list[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("beeps")
    make_data.write(made, sizes=SIZES)
    return made


def records(folder: Path, name: str) -> list[Record]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def beeps_in(path: Path) -> int:
    """Counts the stretches of 20 ms or more whose loudness is far above the noise's."""
    samples, rate = soundfile.read(path)
    assert rate == 16000
    assert 0.4 < len(samples) / rate <= 1.0
    parts = samples[: len(samples) // 160 * 160].reshape(-1, 160)
    loud = np.sqrt((parts**2).mean(-1)) > 0.1
    return int((loud[1:] & ~loud[:-1]).sum() + loud[0])


@pytest.mark.parametrize("name", SIZES)
def test_a_label_is_the_number_of_beeps_in_the_recording(name: str, folder: Path) -> None:
    for record in records(folder, name):
        assert int(record["label"]) == beeps_in(folder / record["audio"][0]), record


def test_a_swapped_question_has_another_s_recording_and_its_own_answer(folder: Path) -> None:
    asked, astray = records(folder, "eval"), records(folder, "swapped")
    assert [line["label"] for line in astray] == [line["label"] for line in asked]
    heard = [line["audio"] for line in asked]
    assert [line["audio"] for line in astray] == heard[1:] + heard[:1]


def test_answers_are_equally_frequent_and_no_recording_comes_twice(folder: Path) -> None:
    seen = set()
    for name, size in SIZES.items():
        found = records(folder, name)
        assert Counter(record["label"] for record in found) == dict.fromkeys("1234", size // 4)
        seen |= {(folder / record["audio"][0]).read_bytes() for record in found}
    assert len(seen) == sum(SIZES.values())


def test_the_same_seed_gives_the_same_files_and_another_does_not(tmp_path: Path) -> None:
    made = []
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        make_data.write(tmp_path / name, seed=seed, sizes={"eval": 8})
        files = sorted((tmp_path / name).rglob("*.*"))
        made.append([file.read_bytes() for file in files])
    assert made[0] == made[1] != made[2]


def test_its_run_can_start() -> None:
    config = load(ROOT / "examples/beeps/grpo.yaml")
    assert violations(config, 2, data=False) == []
    assert list(config.data.held_out) == ["held_out", "swapped"], "demo.py asks for these"


def test_a_question_fits_the_model_and_is_read_as_a_run_reads_it(folder: Path) -> None:
    config = load(ROOT / "examples/beeps/grpo.yaml")
    warm_start.save_processing(folder / "model")
    warm_start.save(warm_start.untrained(), folder / "model")
    audio_processor = audio_processor_of(folder / "model")
    assert audio_processor is not None
    examples = warm_start.read(folder / "eval.jsonl", folder / "model")
    for example, record in zip(examples, records(folder, "eval"), strict=True):
        content = (folder / record["audio"][0]).read_bytes()
        tokens = audio_processor.tokens_of(
            audio_processor.frames_of(audio_processor.samples_of(content, "a"))
        )
        assert example.tokens.count(audio_processor.placeholder) == tokens
        assert audio_processor.frames(content).equal(example.frames)
        assert len(example.tokens) <= config.rollout.max_prompt_tokens
        assert len(example.answer) == config.rollout.max_response_tokens


@pytest.mark.learning
def test_a_model_learns_to_count_beeps_and_listens_for_them(tmp_path: Path) -> None:
    """In 20 steps, from about half of them right; with another's recording it stays at chance."""
    data, model, output = (tmp_path / name for name in ("data", "model", "out"))
    asked = [
        f"model.path={model}",
        f"data.train={data / 'train.jsonl'}",
        f"data.evals.held_out={data / 'eval.jsonl'}",
        f"data.evals.swapped={data / 'swapped.jsonl'}",
        f"trainer.output={output}",
    ]
    for command in (
        ["examples/beeps/make_data.py", data],
        ["examples/beeps/warm_start.py", data, model],
        ["train_rl.py", "examples/beeps/grpo.yaml", *asked, "--processes", "2"],
    ):
        subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    held_out = [
        step["eval_held_out_exact_match"] for step in metrics if "eval_held_out_exact_match" in step
    ]
    assert held_out[-1] > held_out[0] + 0.15
    assert metrics[-1]["eval_swapped_exact_match"] < 0.4
    assert max(step.get("logprob_gap_max", 0.0) for step in metrics) < 1e-4
