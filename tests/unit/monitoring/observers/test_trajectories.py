import base64
import gzip
import io
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rftmega.config import AlgorithmConfig, DataConfig, ModelConfig, RunConfig
from rftmega.config.options.algorithms import GroupNorm
from rftmega.config.options.environments import Tools
from rftmega.core.errors import DataError
from rftmega.core.media_positions import PlacedImage, RowImages
from rftmega.core.ragged import Ragged
from rftmega.core.types import (
    Completion,
    Experience,
    Prompt,
    Rollout,
    Samples,
    TokenStats,
    Trajectory,
    Turn,
)
from rftmega.data.tokenizer import Chat
from rftmega.monitoring.observers.run_chat import RunChat
from rftmega.monitoring.observers.trajectories import Trajectories, described, records, write
from rftmega.trainer.experience import ExperienceMaker, collect
from tests.rollouts import rollout_of

PROMPTS = [Prompt((97, 98, 99), label="x\ud800", index=41), Prompt((100,), label="y", index=7)]
COMPLETIONS = [
    Completion((65, 66), (-0.125, -0.25), "stop", 0),
    Completion((67, 68, 69), (-0.5, -1.0, -0.0001234567), "length", 0),
    Completion((), (), "stop", 0),
    Completion((0x2028, 71), (-0.75, float("-inf")), "stop", 0),
]


class Columns:
    """A policy whose log-prob of the token in column c + 1 is -c and whose entropy is c / 10;
    padding is not a number.
    """

    def __init__(self, entropy: bool = True):
        self.entropy = entropy

    def log_probs(self, rows: Any) -> Any:
        columns = torch.arange(rows.lengths.max() - 1.0).expand(len(rows), -1)
        real = torch.where(columns < rows.lengths[:, None] - 1, columns, torch.nan)
        return rows.like(TokenStats(-real, real / 10 if self.entropy else None))

    reference_log_probs = log_probs


def score(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    sizes = [len(completion.response_ids) for completion in rollouts]
    return [{"exact_match": float(size == 2), "reward": size / 3} for size in sizes]


def text(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def letters(ids: Sequence[int]) -> list[str]:
    return [chr(i) for i in ids]


def trained(entropy: bool = True) -> tuple[Samples[Ragged], Experience[Ragged]]:
    requests = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    rollouts = [rollout_of(asked, said) for asked, said in zip(requests, COMPLETIONS, strict=True)]
    samples = collect(requests, rollouts, score, samples_per_prompt=2)
    return samples, ExperienceMaker(
        Columns(entropy), AlgorithmConfig(advantage=GroupNorm(scale_by_std=False))
    ).make(samples)


def recorded(
    folder: Path,
    *,
    steps: Sequence[int] = (1,),
    every: int = 1,
    most: int = 10**6,
    last: int = 0,
    entropy: bool = True,
) -> list[Path]:
    observer = Trajectories(folder, text, letters, every=every, last=last, most_bytes=most)
    observer.on_start(SimpleNamespace(step=steps[0] - 1, resumed=steps[0] > 1), {})
    for step in steps:
        observer.on_experience(SimpleNamespace(step=step), *trained(entropy))
    return sorted(folder.iterdir())


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().split("\n")[:-1]
    ]


def test_a_line_says_all_about_its_sample(tmp_path: Path) -> None:
    first, second, empty, last = lines_of(recorded(tmp_path)[0])
    assert second == {
        "step": 1, "group": 0, "rollout": 1, "index": 41, "prompt": "abc", "response": "CDE", "label": "x\ud800", "reward": 1.0,
        "reward_parts": {"exact_match": 0.0}, "truncated": True,
        "tokens": {
            "id": [67, 68, 69], "text": ["C", "D", "E"], "engine_logp": [-0.5, -1.0, -0.0001234567],
            "trainer_logp": [-2.0, -3.0, -4.0], "gap": [1.5, 2.0, 4.0], "advantage": [0.1667] * 3, "entropy": [0.2, 0.3, 0.4],
            "chosen": [True] * 3,
        },
    }  # fmt: skip
    assert (first["group"], first["reward"], first["reward_parts"], first["truncated"]) == (
        0,
        0.6666667,
        {"exact_match": 1.0},
        False,
    )
    assert first["tokens"]["advantage"] == [-0.1667] * 2
    assert (empty["prompt"], empty["response"], empty["label"], empty["tokens"]["id"]) == (
        "d",
        "",
        "y",
        [],
    )
    assert last["tokens"]["engine_logp"] == [-0.75, None]
    assert last["tokens"]["gap"] == [-0.75, None]
    assert last["response"] == "\u2028G"


def test_what_was_graded_stands_in_a_rollouts_last_trajectory(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def grading(context: Sequence[int], ids: Sequence[int]) -> str | None:
        asked.append((text(context), text(ids)))
        return None if len(asked) == 2 else f"<{text(ids)}>"

    observer = Trajectories(tmp_path, text, letters, every=1, most_bytes=10**6, grading=grading)
    observer.on_start(SimpleNamespace(step=0, resumed=False), {})
    observer.on_experience(SimpleNamespace(step=1), *trained())
    (path,) = tmp_path.iterdir()
    said = [line["graded"] for line in lines_of(path)]
    assert said[1:3] == [None, "<>"]
    assert said[3] == "<\u2028G>"
    assert asked[1] == ("abc", "CDE")


def test_tokens_of_the_environment_have_no_numbers(tmp_path: Path) -> None:
    first, second = Completion((65,), (-0.5,), "stop", 0), Completion((66,), (-1.0,), "stop", 0)
    turns = Rollout((Trajectory.of((97,), first, (120, 121), second),))
    samples = collect([PROMPTS[1]] * 2, [turns, turns], score, samples_per_prompt=2)
    experience = ExperienceMaker(Columns()).make(samples)
    observer = Trajectories(tmp_path, text, letters, every=1, most_bytes=10**6)
    observer.on_experience(SimpleNamespace(step=1), samples, experience)
    tokens = lines_of(next(tmp_path.iterdir()))[0]["tokens"]
    assert tokens["text"] == ["A", "x", "y", "B"]
    assert tokens["chosen"] == [True, False, False, True]
    assert tokens["engine_logp"] == [-0.5, None, None, -1.0]
    assert tokens["trainer_logp"] == [0.0, None, None, -3.0]
    assert tokens["gap"] == [-0.5, None, None, 2.0]


def test_trajectories_of_a_rollout_are_numbered_and_tell_their_turns_and_measures(
    tmp_path: Path,
) -> None:
    asked = Prompt(
        (97, 98),
        index=3,
        label="7",
        record=json.dumps(
            {
                "prompt": "ab",
                "question": "ab",
                "label": "7",
                "answer": "?",
                "hardness": float("nan"),
            }
        ),
    )
    first, second = Completion((65,), (-0.5,), "stop", 0), Completion((66,), (-1.0,), "stop", 0)
    said = (
        Turn("assistant", 2, 3, reward=0.25),
        Turn("tool", 4, 5, "add"),
        Turn("assistant", 6, 7, reward=-0.5),
    )
    one = Trajectory.of((97, 98), first, (120, 52, 121), second, turns=said)
    two = Trajectory.of((97, 98, 65), second, turns=(Turn("assistant", 3, 4),))
    rollouts = [
        Rollout((Trajectory.of((97, 98), first),), measures={"turns": 1.0, "calls": 0.0}),
        Rollout((one, two), measures={"turns": 3.0}),
    ]
    samples = collect([asked] * 2, rollouts, score, samples_per_prompt=2)
    experience = ExperienceMaker(Columns()).make(samples)
    lines = list(records(1, samples, experience, text, letters))
    assert [line["rollout"] for line in lines] == [0, 1, 1]
    assert [(line.get("trajectory"), line.get("trajectories")) for line in lines] == [
        (None, None),
        (0, 2),
        (1, 2),
    ]
    assert lines[1]["turns"] == [
        {"role": "assistant", "name": "", "start": 0, "stop": 1, "reward": 0.25},
        {"role": "tool", "name": "add", "start": 2, "stop": 3, "reward": 0.0},
        {"role": "assistant", "name": "", "start": 4, "stop": 5, "reward": -0.5},
    ]
    assert [lines[1]["tokens"]["text"][turn["start"]] for turn in lines[1]["turns"]] == [
        "A",
        "4",
        "B",
    ]
    assert [(turn["start"], turn["stop"]) for turn in lines[2]["turns"]] == [(0, 1)]
    assert "turns" not in lines[0]
    assert [line["measures"] for line in lines] == [
        {"turns": 1.0, "calls": 0.0},
        {"turns": 3.0},
        {"turns": 3.0},
    ]
    assert [line["columns"] for line in lines] == [{"answer": "?", "hardness": "NaN"}] * 3
    assert [line["messages"] for line in lines] == [[{"role": "user", "content": "ab"}]] * 3


def test_how_messages_become_tokens_is_written_beside_and_read_back(tmp_path: Path) -> None:
    config = RunConfig(
        model=ModelConfig(path="models/a"),
        data=DataConfig(train="x"),
        environment=Tools(renderer="template", tool_parser="hermes"),
    )
    chat = RunChat.of(config, Chat("Be brief.", None, {"deep": False}, [{"type": "function"}]))
    observer = Trajectories(tmp_path, text, letters, every=1, most_bytes=1, chat=chat)
    observer.on_start(SimpleNamespace(step=0, resumed=False), {})
    found = RunChat.read(tmp_path)
    assert (found.model, found.renderer, found.tool_parser) == ("models/a", "template", "hermes")
    assert found.chat == {
        "system": "Be brief.",
        "template": None,
        "given": {"deep": False},
        "tools": [{"type": "function"}],
        "keep_reasoning": False,
    }
    assert RunChat.read(tmp_path / "older") == RunChat()
    (tmp_path / "chat.json").write_text('{"model": "a", "renderer": 3}')
    with pytest.raises(DataError, match="look at renderer, tool_parser, chat"):
        RunChat.read(tmp_path)


def test_entropy_that_the_policy_does_not_give_is_null(tmp_path: Path) -> None:
    assert {
        line["tokens"]["entropy"] for line in lines_of(recorded(tmp_path, entropy=False)[0])
    } == {None}


def test_experience_keeps_the_entropy_of_selected_rows() -> None:
    _, experience = trained()
    chosen = experience.select(torch.tensor([3, 2])).padded()
    assert chosen.entropy is not None
    assert chosen.entropy.shape == chosen.old_logp.shape == (2, 2)
    assert chosen.entropy[0].tolist() == pytest.approx([0, 0.1])
    assert trained(entropy=False)[1].select(torch.tensor([0])).entropy is None


def test_standard_tools_open_it_and_equal_samples_give_equal_bytes(tmp_path: Path) -> None:
    path, same = recorded(tmp_path / "a")[0], recorded(tmp_path / "b")[0]
    printed = subprocess.run(["gzip", "-dc", str(path)], capture_output=True, check=True).stdout
    assert [json.loads(line) for line in printed.split(b"\n")[:-1]] == lines_of(path)
    assert path.read_bytes() == same.read_bytes()
    assert path.read_bytes()[4:8] == bytes(4), "no time of writing"


def test_the_first_and_every_nth_step_is_written(tmp_path: Path) -> None:
    names = [path.name for path in recorded(tmp_path, steps=range(1, 8), every=3)]
    assert names == ["step_000001.jsonl.gz", "step_000003.jsonl.gz", "step_000006.jsonl.gz"]


def test_the_oldest_make_room_and_the_newest_stays(tmp_path: Path) -> None:
    size = recorded(tmp_path / "a")[0].stat().st_size
    kept = recorded(tmp_path / "b", steps=range(1, 6), most=2 * size + size // 2)
    assert [path.name[5:11] for path in kept] == ["000004", "000005"]
    assert [path.name[5:11] for path in recorded(tmp_path / "c", steps=[1, 2], most=1)] == [
        "000002"
    ]


def test_what_an_earlier_run_left_of_steps_to_come_goes_and_the_rest_stays(tmp_path: Path) -> None:
    recorded(tmp_path, steps=range(1, 6))
    (tmp_path / "notes.txt").write_text("mine")
    names = [path.name for path in recorded(tmp_path, steps=[3])]
    assert names == ["notes.txt", *(f"step_00000{i}.jsonl.gz" for i in (1, 2, 3))]


def test_a_run_that_begins_anew_keeps_an_earlier_ones(tmp_path: Path) -> None:
    for folder in ("trajectories.1", "trajectories.2", "trajectories"):
        names = [path.name for path in recorded(tmp_path / "trajectories", steps=[1, 2])]
        assert names == ["step_000001.jsonl.gz", "step_000002.jsonl.gz"], folder
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trajectories",
        "trajectories.1",
        "trajectories.2",
    ]
    assert len(list((tmp_path / "trajectories.1").iterdir())) == 2


def test_a_file_that_was_not_finished_has_no_name(tmp_path: Path) -> None:
    def broken() -> Any:
        yield {"a": 1}
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "step_000001.jsonl.gz", broken())
    assert not list(tmp_path.glob("step_*"))


def test_images_of_a_prompt_are_named_and_shown_once_a_file(tmp_path: Path) -> None:
    drawn = Image.new("RGB", (400, 100), (200, 10, 10))
    drawn.save(tmp_path / "a.png")
    seen = PlacedImage(str(tmp_path / "a.png"), "a" * 64, (1, 2, 4), 1, 2)
    gone = PlacedImage(str(tmp_path / "gone.png"), "b" * 64, (1, 2, 2), 4, 1)
    inside = PlacedImage((tmp_path / "a.png").read_bytes(), "c" * 64, (1, 2, 4), 1, 2)
    prompts = [
        Prompt(tuple(map(ord, "x__y_z")), images=(seen, gone)),
        Prompt(tuple(map(ord, "x__y")), images=(inside,)),
    ]
    rollouts = [rollout_of(prompt, COMPLETIONS[0]) for prompt in prompts]
    samples = collect(prompts, rollouts, score, samples_per_prompt=1)
    experience = ExperienceMaker(Columns()).make(samples)
    observer = Trajectories(tmp_path / "out", text, letters, every=1, most_bytes=10**6)
    observer.on_start(SimpleNamespace(step=0, resumed=False), {})
    for step in (1, 2):
        observer.on_experience(SimpleNamespace(step=step), samples, experience)
    for file in sorted((tmp_path / "out").iterdir()):
        first, second = lines_of(file)
        assert (first["prompt"], second["prompt"]) == ("x_y_z", "x_y"), "a placeholder an image"
        one, other = first["images"]
        small = Image.open(io.BytesIO(base64.b64decode(one["thumbnail"])))
        assert small.size == (96, 24)
        assert np.abs(np.asarray(small).astype(int) - (200, 10, 10)).max() < 9
        assert (one["path"], one["grid"]) == (str(tmp_path / "a.png"), [1, 2, 4])
        assert (other["digest"], other["thumbnail"]) == ("b" * 64, None)
        assert second["images"][0]["path"] is None
    again = RowImages.of([(seen,), (seen,)])
    assert again is not None
    shown: set[str] = set()
    written = [described(image, shown) for row in again.rows for image in row]
    assert ["thumbnail" in each for each in written] == [True, False]


def test_the_first_and_the_last_step_are_always_written(tmp_path: Path) -> None:
    paths = recorded(tmp_path, steps=range(1, 9), every=3, last=8)
    assert [path.name for path in paths] == [f"step_{step:06d}.jsonl.gz" for step in (1, 3, 6, 8)]
