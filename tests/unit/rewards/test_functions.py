"""Reward functions of a user's own are called as TRL calls them."""

import asyncio
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from rftmega.config import RewardConfig
from rftmega.config.user_code.functions import function_of, give
from rftmega.core.errors import ConfigError, DataError, RewardError
from rftmega.core.types import Prompt, Rollout
from rftmega.rewards import check_prompts, create
from tests.rollouts import answered


def said(text: str) -> Rollout:
    return answered(tuple(map(ord, text)), (), "stop", 0)


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def asked(index: int = 0, kind: str = "", **columns: Any) -> Prompt:
    record = json.dumps(columns) if columns else ""
    return Prompt((ord("?"),), index=index, kind=kind, record=record)


def scores(
    functions: Sequence[Callable[..., Any]],
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    **options: Any,
) -> list[dict[str, float]]:
    config = RewardConfig(exact_match=0.0, functions=give(functions), **options)
    check_prompts(config, prompts)
    return create(config, decode)(prompts, [said(text) for text in texts])


def test_a_function_gets_prompts_answers_token_ids_and_the_columns_of_the_data() -> None:
    seen: dict[str, Any] = {}

    def length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, **columns)
        return [float(len(text)) for text in completions]

    prompts = [
        asked(prompt="a", answer="1", level=3),
        asked(prompt="b", answer="2", note=[1, None]),
    ]
    found = scores([length], prompts, ["xyz", "x"])
    assert found == [{"length": 3.0, "reward": 3.0}, {"length": 1.0, "reward": 1.0}]
    assert seen == {
        "prompts": ["a", "b"],
        "completions": ["xyz", "x"],
        "completion_ids": [[ord("x"), ord("y"), ord("z")], [ord("x")]],
        "answer": ["1", "2"],
        "level": [3, None],
        "note": [None, [1, None]],
        "trajectories": [said("xyz").trajectories, said("x").trajectories],
    }


def test_messages_are_answered_with_messages_as_in_trl() -> None:
    talk = [{"role": "user", "content": "hello"}]

    def polite(prompts: Any, completions: Any) -> list[bool]:
        assert prompts == [talk]
        return [completion[0]["content"].endswith("please") for completion in completions]

    found = scores([polite], [asked(prompt=talk)], ["yes please"])
    assert found == [{"polite": 1.0, "reward": 1.0}]


def test_a_prompt_that_is_no_record_of_a_data_set_is_given_as_text_with_its_label() -> None:
    def same(prompts: Any, completions: Any, label: Any) -> list[bool]:
        return [prompt + given == text for prompt, given, text in zip(prompts, label, completions, strict=True)]  # fmt: skip

    found = create(RewardConfig(exact_match=0.0, functions=give([same])), decode)(
        [Prompt((ord("?"),), label="b")], [said("?b")]
    )
    assert found[0]["same"] == 1.0


def test_functions_are_weighted_in_their_order_or_by_kind() -> None:
    def one(completions: Any, **_: Any) -> list[float]:
        return [1.0] * len(completions)

    def two(completions: Any, **_: Any) -> list[float]:
        return [2.0] * len(completions)

    prompts = [asked(kind="a", prompt="p"), asked(kind="b", prompt="p")]
    weighted = scores([one, two], prompts, ["", ""], function_weights=[10.0, 0.5])
    assert [score["reward"] for score in weighted] == [11.0, 11.0]
    by_kind = scores([one, two], prompts, ["", ""], recipe={"a": {"one": 3.0}, "b": {"two": 1.0}})
    assert by_kind == [{"one": 1.0, "reward": 3.0}, {"two": 2.0, "reward": 2.0}]


def test_none_says_that_a_function_does_not_apply() -> None:
    def sums(completions: Any, task: Any) -> list[float | None]:
        return [1.0 if each == "sum" else None for each in task]

    def words(completions: Any, task: Any) -> list[float | None]:
        return [0.25 if each == "word" else None for each in task]

    prompts = [asked(i, prompt="p", task=task) for i, task in enumerate(("sum", "word"))]
    assert scores([sums, words], prompts, ["", ""]) == [
        {"sums": 1.0, "reward": 1.0},
        {"words": 0.25, "reward": 0.25},
    ]
    with pytest.raises(RewardError, match=r"applies to prompt 1: sums gave None"):
        scores([sums], prompts, ["", ""])


@pytest.mark.parametrize("many", [numpy.array, torch.tensor, tuple, iter])
def test_numbers_may_come_as_an_array_or_a_tensor(many: Callable[[Any], Any]) -> None:
    def half(completions: Any) -> Any:
        return many([0.5] * len(completions))

    assert [s["half"] for s in scores([half], [asked(prompt="p")] * 2, ["", ""])] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([1.0], "gave 1 score(s) for 2 completion(s): return one for each"),
        ([1.0, 2.0, 3.0], "gave 3 score(s) for 2 completion(s)"),
        (1.0, "gave float for 2 completion(s): return a list"),
        (None, "gave NoneType for 2 completion(s): return a list"),
        ("ab", "gave str for 2 completion(s)"),
        ({"a": 1, "b": 2}, "gave dict for 2 completion(s)"),
        (["1", "2"], "gave '1' as a score: return a number, or None"),
        ([[1.0], [2.0]], "gave [1.0] as a score"),
        ([1.0, float("nan")], "gave nan for prompt 0: not a finite number"),
        ([1.0, float("inf")], "gave inf for prompt 0: not a finite number"),
    ],
)
def test_what_are_no_scores_is_refused_with_the_functions_name(given: Any, complaint: str) -> None:
    def mine(completions: Any) -> Any:
        return given

    with pytest.raises(RewardError, match=re.escape(complaint)) as raised:
        scores([mine], [asked(prompt="p")] * 2, ["", ""])
    assert "mine" in str(raised.value)


def test_what_a_function_raises_is_told_with_its_line() -> None:
    def broken(completions: Any) -> list[float]:
        return [float(text) for text in completions]

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(RewardError) as raised:
        scores([broken], [asked(prompt="p")], ["x"])
    told = "reward.functions: broken raised ValueError: could not convert string to float: 'x'"
    assert str(raised.value) == f"{told} ({__file__}:{line})"


def test_a_function_that_is_no_plain_one_is_called_alike() -> None:
    class Judge:
        def __call__(self, completions: Any, **_: Any) -> list[float]:
            return [1.0 for _ in completions]

    async def awaited(completions: Any) -> list[float]:
        return [2.0 for _ in completions]

    def least(completions: Any, number: float) -> list[float]:
        return [number for _ in completions]

    functions = [Judge(), awaited, functools.partial(least, number=3.0), lambda **_: [4.0]]
    (score,) = scores(functions, [asked(prompt="p")], [""])
    assert score == {"Judge": 1.0, "awaited": 2.0, "least": 3.0, "lambda": 4.0, "reward": 10.0}


def test_calls_of_a_function_wait_for_each_other() -> None:
    at_once, most = 0, 0
    count = threading.Lock()

    def slow(completions: Any) -> list[float]:
        nonlocal at_once, most
        with count:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.01)
        with count:
            at_once -= 1
        return [0.0 for _ in completions]

    reward = create(RewardConfig(exact_match=0.0, functions=give([slow])), decode)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: reward([asked(prompt="p")], [said("")]), range(8)))
    assert most == 1


def test_a_column_that_is_not_there_is_told_before_training() -> None:
    def needs(completions: Any, answer: Any, level: Any = None) -> list[float]:
        return [0.0]

    prompts = [asked(n, prompt="p", answr="q", hint="r") for n in (7, 8)]
    with pytest.raises(DataError) as error:
        scores([needs], [*prompts, asked(9, prompt="p", answer="q")], [""] * 3)
    assert str(error.value) == (
        "reward.functions: needs asks for answer, which is no column of 2 of 3 records (the first is prompt 7). The columns "
        "are: answr, hint. Did you mean answr? data.columns gives a column another name."
    )
    assert scores([needs], [asked(7, prompt="p", answer="q")], [""])[0]["reward"] == 0.0


def test_a_column_that_is_looked_up_and_not_there_is_told_with_the_columns() -> None:
    def needs(completions: Any, **columns: Any) -> list[float]:
        return [float(each) for each in columns["levl"]]

    with pytest.raises(RewardError, match=r"columns are: level. Did you mean level\?"):
        scores([needs], [asked(7, prompt="p", level=1)], [""])


def test_references_name_a_function_of_a_file_or_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(completions):\n    return [1.0]\nx = 1\n")
    assert function_of(f"{tmp_path}/mine.py:f")(completions=[""]) == [1.0]
    assert function_of("math:sqrt")(4) == 2
    give([len])
    assert function_of("python:len") is len
    for reference, told in (
        ("mine", "must be FILE.py:FUNCTION or MODULE:FUNCTION"),
        (f"{tmp_path}/mine.py:", "must be FILE.py:FUNCTION or MODULE:FUNCTION"),
        (f"{tmp_path}/mine.py:g", "g of .*mine.py is not there"),
        (f"{tmp_path}/mine.py:x", "x of .*mine.py is no function"),
        (f"{tmp_path}/yours.py:f", "there is no file .*yours.py"),
        ("nowhere.to_be:found", "module nowhere.to_be can't be imported: ModuleNotFoundError"),
        ("python:g", r"python:g was given to rftmega.train in Python. Give it again, as rewards=\[g\]"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=told):
            function_of(reference)
    with pytest.raises(ConfigError, match="two functions have the name len"):
        give([len, len])
    with pytest.raises(ConfigError, match="3 is no function"):
        give([3])  # type: ignore[list-item]


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), asyncio.CancelledError()])
def test_a_function_that_ends_its_program_is_a_failing_reward(error: BaseException) -> None:
    def ends(completions: Any) -> list[float]:
        raise error

    with pytest.raises(RewardError, match=f"ends raised {type(error).__name__}"):
        scores([ends], [asked(prompt="p")], [""])


def test_a_file_that_ends_its_program_when_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match="ends.py can't be read: SystemExit: 3"):
        function_of(f"{tmp_path}/ends.py:f")
