"""The one rule for paths in a config, and what is said of a file that another rule would find."""

import re
from pathlib import Path

import pytest

from rftmega.config import load
from rftmega.config.paths import READ, WRITTEN, misplaced
from rftmega.config.tree import options, walk
from rftmega.core.errors import ConfigError
from rftmega.run.option_reference import documented

# options that speak of files and folders, and name none
NO_PATHS = {
    *(
        "model.trust_remote_code",
        "model.verify",
        "model.ignore_config_fields",
        "rollout.transport",
        "data.images_key",
    ),
    *("trainer.push_to_hub", "model.lora.targets", "data.videos_key"),
    *("data.audio_key", "data.video_fps", "data.media_hosts"),
}
GIVEN = {  # option -> a value of it, in which FILE is a path
    "plugins": ["FILE"],
    "algorithm.recipe": "FILE.yaml",
    "data.train": "FILE#train",
    "data.sources": {"FILE": 1.0},
    "data.evals": {"easy": "FILE"},
    "model.lora.evaluated": {"first": "FILE"},
    "reward.functions": ["FILE.py:f"],
    "environment.tools": ["FILE.py:f"],
    "environment.function": "FILE.py:f",
    "reward.judge_template": "FILE.txt",
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose config is in a folder of its own; the run is started in the project."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/run.yaml").write_text("model: {path: x}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_relative_path_means_the_same_in_a_file_a_dictionary_and_on_the_command_line(
    world: Path,
) -> None:
    tree = {
        "model": {"path": "models/tiny"},
        "data": {"train": "data/train.jsonl"},
        "reward": {"functions": ["code/mine.py:f"]},
        "trainer": {"output": "runs/a"},
    }
    (world / "configs/run.yaml").write_text(
        "model: {path: models/tiny}\ndata: {train: data/train.jsonl}\n"
        "reward: {functions: ['code/mine.py:f']}\ntrainer: {output: runs/a}\n"
    )
    overrides = [
        *("model.path=models/tiny", "data.train=data/train.jsonl", "trainer.output=runs/a"),
        "reward.functions=[code/mine.py:f]",
    ]
    (world / "empty.yaml").write_text("")
    found = [load("configs/run.yaml"), load(tree), load("empty.yaml", overrides)]
    assert found[0] == found[1] == found[2]
    assert (found[0].model.path, found[0].trainer.output) == ("models/tiny", "runs/a")
    assert found[0].reward.functions == ["code/mine.py:f"]


@pytest.mark.parametrize("name", READ)
def test_a_file_beside_the_yaml_file_only_is_refused_with_the_path_to_write(
    name: str, world: Path
) -> None:
    given = GIVEN.get(name, "FILE")
    for file in ("FILE", "FILE.py", "FILE.txt", "FILE.yaml"):
        (world / "configs" / file).write_text("")
    told = misplaced({name: given}, Path("configs"))[name]
    assert "there is no FILE" in told and str(world) in told
    assert re.search(r"there is configs/FILE\S*\. Write configs/FILE", told), told
    assert misplaced({name: given}, world) == {}, "nothing is said where both rules agree"
    for file in ("FILE", "FILE.py", "FILE.txt", "FILE.yaml"):
        (world / file).write_text("")
    assert misplaced({name: given}, Path("configs")) == {}, "the working directory has it"


def test_all_misplaced_files_of_a_config_are_one_error(world: Path) -> None:
    for file in ("train.jsonl", "rewards.py", "held_out.jsonl"):
        (world / "configs" / file).write_text("")
    (world / "configs/run.yaml").write_text(
        "model: {path: org/name}\ndata: {train: train.jsonl}\nreward: {functions: [rewards.py:f]}\n"
    )
    with pytest.raises(ConfigError) as raised:
        load("configs/run.yaml", ["data.eval=held_out.jsonl"])
    for told in ("configs/train.jsonl", "configs/rewards.py:f", "configs/held_out.jsonl"):
        assert f"Write {told}" in str(raised.value)
    assert "org/name" not in str(raised.value)


def test_what_an_override_replaces_is_not_looked_for(world: Path) -> None:
    (world / "configs/train.jsonl").write_text("")
    (world / "configs/run.yaml").write_text("model: {path: x}\ndata: {train: train.jsonl}\n")
    assert load("configs/run.yaml", ["data.train=other.jsonl"]).data.train == "other.jsonl"


def test_a_name_of_the_hub_or_of_a_module_stays_as_it_is(world: Path) -> None:
    (world / "configs/run.yaml").write_text(
        "model: {path: org/name@main}\ndata: {train: 'org/data#train'}\n"
        "reward: {functions: ['package.rewards:f']}\n"
    )
    config = load("configs/run.yaml")
    assert (config.model.path, config.data.train) == ("org/name@main", "org/data#train")
    assert config.reward.functions == ["package.rewards:f"]


def test_a_base_is_found_from_the_file_that_names_it(world: Path) -> None:
    (world / "configs/more.yaml").write_text("base: run.yaml\ntrainer: {steps: 3}\n")
    assert load("configs/more.yaml").model.path == "x"


def test_every_option_that_speaks_of_a_file_has_its_place_in_the_rule() -> None:
    """An option whose description names a file or a folder is read, written, or known to be none."""
    text = {
        option.name: documented(option.owner).get(option.name.rpartition(".")[2], ("", ""))[1]
        for option in walk()
    }
    kinds = options()
    speaking = {
        name
        for name, said in text.items()
        if re.search(r"\b(file|folder|path)s?\b", said, re.IGNORECASE)
        and (kinds[name] is str or "str" in str(kinds[name]))
    }
    missing = speaking - set(READ) - set(WRITTEN) - NO_PATHS
    assert missing == set()
