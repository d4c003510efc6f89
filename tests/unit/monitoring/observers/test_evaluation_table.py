"""A few completions of an evaluation are on the console, more are in a table."""

import logging
from collections.abc import Sequence

import pytest

from rftmega.core.types import Completion, Prompt, Rollout, Trajectory
from rftmega.monitoring.observers.evaluate import Evaluated
from rftmega.monitoring.observers.evaluation_table import MOST_ROWS, EvaluationTable


def letters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def evaluated(number: int, response: str = "so") -> Evaluated:
    prompt = Prompt((97, 98), label="x", index=number)
    completion = Completion(tuple(map(ord, response)), (-0.5,) * len(response), "stop", 0)
    rollout = Rollout((Trajectory.of((97, 98), completion),))
    return Evaluated("easy", "", 0, prompt, rollout, {"math": 0.0, "reward": 0.5})


def test_some_completions_are_printed_and_up_to_100_are_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    table = EvaluationTable(letters, printed=2)
    lost = Evaluated("easy", "", 0, Prompt((97,)), Rollout((), lost="away"), {})
    table(7, [lost, *(evaluated(n, "a\x1b[2Jb") for n in range(300))])
    (said,) = caplog.messages
    head, *lines = said.splitlines()
    assert head == "Evaluation after step 7: 2 of 301 completions."
    assert lines == [
        '- reward 0.5 (math 0); label "x"; set easy; prompt "ab"',
        '  "a\\x1b[2Jb"',
    ] * 2  # fmt: skip
    assert (table.step, len(table.rows)) == (7, MOST_ROWS)
    assert [row.place for row in table.rows] == list(range(0, 300, 3))
    assert table.rows[1][:6] == (7, "easy", 3, "ab", "a\x1b[2Jb", "x")
    assert table.rows[1][6:] == (0.5, "math 0")


def test_an_evaluation_without_a_completion_prints_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    table = EvaluationTable(letters, printed=2)
    table(0, [])
    assert not caplog.messages
    assert table.rows == []
