"""Regular expressions on answers take bounded time: a policy can find the text that makes one try
for ever.
"""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rftmega.rewards import patterns
from rftmega.rewards.multiple_choice import chosen_letter
from rftmega.rewards.patterns import Pattern

ROOT = Path(__file__).parents[3]
ENDLESS = "a" * 40 + "!"  # 2^40 ways to split it


def test_a_pattern_that_tries_for_ever_is_ended_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    greedy = Pattern("((a|a)+)+b", "reward.answer_pattern")
    with caplog.at_level(logging.WARNING):
        assert greedy.last(ENDLESS) is None
        assert len(caplog.records) == 1
        assert not greedy.whole(ENDLESS)
        assert len(caplog.records) == 1, "once is enough"
        other = Pattern("((a|a)+)+b", "reward.format_pattern")
        assert not other.whole(ENDLESS)
        assert len(caplog.records) == 2
    assert (
        "reward.answer_pattern='((a|a)+)+b' took more than 0.2 s on a completion of 41 characters"
        in caplog.text
    )
    assert greedy.last("aab") == "aa"


def test_the_last_match_and_its_first_group_count() -> None:
    assert Pattern(r"=(\d+)", "x").last("1+1=2, 2+2=4") == "4"
    assert Pattern(r"=\d+", "x").last("1+1=2, 2+2=4") == "=4"
    assert Pattern("a.c", "x", dot_all=True).whole("a\nc")
    assert not Pattern("a.c", "x").whole("a\nc")


def test_multiple_choice_is_linear_in_the_length_of_an_answer() -> None:
    """Minutes of work where it is quadratic, in a process of its own that can be ended; 0.05 s a
    text where it is linear.
    """
    texts = [
        *(
            "answer" + " " * 800_000 + "!",
            "the answer is" + ": * " * 100_000 + "-",
            "choice" + " option " * 100_000,
        ),
        *(
            "A," + " " * 800_000,
            "\\boxed{" * 50_000,
            ("A. " * 100_000) + "x",
            "\n" + " " * 800_000 + "12",
        ),
        *(word + " " * 200_000 + "12" for word in ("So option", "It is", "A", "选")),
        "\n" * 200_000 + "12",
    ]
    program = (
        "import json, sys; from rftmega.rewards.multiple_choice import chosen_letter\n"
        "for text in json.load(sys.stdin): print(chosen_letter(text))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.split() == [
        *["None", "None", "None", "A", "None", "A", "None"],
        *["None"] * 5,
    ]


@pytest.mark.parametrize(
    ("text", "letter"),
    [("The answer  is :  ** B **", "B"), ("answer: option C", "C"), ("Answer :\n\n(D)", "D"), ("the choice is choice (a)", "A"),
     ("answer", None), ("the answer is a number", None)],
)  # fmt: skip
def test_statements_are_read_as_before(text: str, letter: str | None) -> None:
    assert chosen_letter(text) == letter
