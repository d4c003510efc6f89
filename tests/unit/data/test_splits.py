"""What a run reads: what is held out is never learnt from, and each file keeps to its limits."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import AlgorithmConfig, DataConfig, RolloutConfig, RunConfig, TrainerConfig
from rftmega.core.errors import DataError
from rftmega.core.types import Prompt
from rftmega.data.splits import given_of, prompts_of, ptx_of


class Letters:
    """A letter is a token."""

    stop_ids = (0,)

    def encode(self, prompt: str, *, chat_template: bool) -> tuple[int, ...]:
        return tuple(map(ord, prompt))

    def encode_response(
        self, prompt: str, completion: str, *, chat_template: bool
    ) -> tuple[int, ...]:
        return (*map(ord, completion), 0)


def written(path: Path, prompts: Sequence[str]) -> str:
    records = [
        {"prompt": p, "label": "x", "response": p.upper(), "chosen": p.upper(), "rejected": p}
        for p in prompts
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    data = DataConfig(
        train=written(tmp_path / "train.jsonl", ["aa", "bb", "cc", "dd", "ee"]),
        evals={
            "one": written(tmp_path / "one.jsonl", ["ff", "gg"]),
            "two": written(tmp_path / "two.jsonl", ["hh"]),
        },
        ptx=written(tmp_path / "ptx.jsonl", ["ii", "jj", "kk"]),
    )
    rollout = RolloutConfig(max_prompt_tokens=4, max_response_tokens=4)
    return RunConfig(data=data, rollout=rollout, trainer=TrainerConfig(prompts_per_step=2, seed=3))


def words(prompts: Sequence[Prompt]) -> list[str]:
    return ["".join(map(chr, prompt.token_ids)) for prompt in prompts]


def batches(order: Any, number: int) -> list[Any]:
    stream = iter(order)
    return [next(stream) for _ in range(number)]


def test_no_held_out_prompt_is_trained_from_and_none_of_the_training_is_held_out(
    config: RunConfig,
) -> None:
    checked: list[list[str]] = []
    order, held_out = prompts_of(
        config, Letters(), check=lambda prompts: checked.append(words(prompts))
    )
    trained = {word for batch in batches(order, 20) for word in words(batch)}
    assert trained == {"aa", "bb", "cc", "dd", "ee"}
    assert {name: words(prompts) for name, prompts in held_out.items()} == {
        "one": ["ff", "gg"],
        "two": ["hh"],
    }
    assert checked == [["aa", "bb", "cc", "dd", "ee"], ["ff", "gg"], ["hh"]], (
        "every file is checked"
    )


def test_rows_that_are_given_to_learn_are_not_those_that_are_held_out(config: RunConfig) -> None:
    for task, rows_each in (("sft", 1), ("reward_model", 2)):
        config.algorithm = AlgorithmConfig(task=task)
        order, held_out = given_of(config, Letters())
        trained = {
            chr(int(rows.tokens[b, 0])) for rows in batches(order, 20) for b in range(len(rows))
        }
        assert trained == set("abcde"), task
        assert {name: len(rows) for name, rows in held_out.items()} == {
            "one": 2 * rows_each,
            "two": rows_each,
        }
        assert {
            chr(int(token)) for rows in held_out.values() for token in rows.tokens[:, 0]
        } == set("fgh")


def test_given_answers_come_in_an_order_of_their_own(config: RunConfig) -> None:
    order = ptx_of(config, Letters())
    assert order is not None
    assert {chr(int(rows.tokens[0, 0])) for rows in batches(order, 20)} == set("ijk")
    assert all(len(rows) == 2 for rows in batches(order, 5))
    config.data.ptx = ""
    assert ptx_of(config, Letters()) is None


@pytest.mark.parametrize(
    ("prompt", "response", "what"),
    [("aaaaa", "b", "max_prompt_tokens"), ("a", "bbbbb", "max_response_tokens")],
)
def test_limits_are_those_of_the_rollout(
    prompt: str, response: str, what: str, config: RunConfig, tmp_path: Path
) -> None:
    config.algorithm = AlgorithmConfig(task="sft")
    config.data.train = str(tmp_path / "long.jsonl")
    Path(config.data.train).write_text(json.dumps({"prompt": prompt, "response": response}))
    with pytest.raises(DataError, match=what):
        given_of(config, Letters())


@pytest.mark.parametrize("broken", ["train.jsonl", "two.jsonl"])
def test_what_speaks_against_prompts_is_told_with_their_file(
    config: RunConfig, broken: str
) -> None:
    word = {"train.jsonl": "cc", "two.jsonl": "hh"}[broken]

    def check(prompts: Sequence[Prompt]) -> None:
        if word in words(prompts):
            raise DataError("f asks for level, which is no column (prompt 0).")

    with pytest.raises(DataError, match=rf"/{broken}: f asks for level"):
        prompts_of(config, Letters(), check=check)
