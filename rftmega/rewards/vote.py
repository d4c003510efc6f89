"""Majority voting as a reward: the most frequent answer to a prompt is taken as correct (TTRL,
arXiv:2504.16084, section 2).
"""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

_BRACE = re.compile(r"\\boxed\{|[{}]")
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?(/\d+)?")
_LONGEST_NUMBER = 100  # characters; a longer one is compared as text


def canonical(answer: str | None) -> str | None:
    r"""Returns the canonical form of an answer for voting; None, which does not vote, for an empty
    one.

    The last \boxed{...} replaces the whole; surrounding white space and dollar signs and a final
    full stop are removed, runs of white space become one space, and case is ignored. Numbers are
    compared by value: 7, 07, 7.0, +7 and $7.$ are equal, as are 1/2 and 0.5, or 1,000 and 1000. No
    other mathematics is understood.
    """
    if answer is None:
        return None
    text = " ".join(_boxed(answer).split()).strip("$ ").removesuffix(".").strip("$ ").casefold()
    if len(text) <= _LONGEST_NUMBER and any(map(str.isdecimal, text)) and _NUMBER.fullmatch(text):
        try:
            return str(Fraction(text.replace(",", "")))
        except (ValueError, ZeroDivisionError):  # 1/0, 1.5/2
            return text
    return text or None


def majority(answers: Sequence[str | None]) -> str | None:
    """Returns the most frequent answer in canonical form; of equally frequent ones, the first to
    appear. Returns None if no answer votes, because all are None or empty.
    """
    votes = Counter(vote for answer in answers if (vote := canonical(answer)) is not None)
    # a Counter keeps the order of appearance, and max returns the first of equals
    return max(votes, key=lambda vote: votes[vote], default=None)


def vote_rewards(
    groups: Sequence[Sequence[str | None]], *, train: int | None = None
) -> list[list[float]]:
    """Returns the score of every answer of every group (the completions of one prompt): 1 if it
    equals its group's majority, else 0 (also for None).

    All answers of a group vote and are scored. `train`: how many answers of each group, from its
    beginning, the caller will train on (the paper votes with 64 answers and trains on 32); this
    function only checks the number. Raises ValueError if a group has fewer than `train` answers.
    """
    if train is not None and (short := min(map(len, groups), default=train)) < train:
        raise ValueError(
            f"A group of {short} completions can't give {train} to train on. Vote with more, or train on fewer."
        )
    return [_group_rewards(group) for group in groups]


def _group_rewards(group: Sequence[str | None]) -> list[float]:
    winner = majority(group)
    return [float(winner is not None and canonical(answer) == winner) for answer in group]


def _boxed(text: str) -> str:
    """Returns the content of the last LaTeX box that is closed, with balanced braces; the text
    itself if there is no such box.
    """
    open_braces: list[re.Match[str]] = []
    begin, found = -1, text
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append(brace)
        elif open_braces and (opened := open_braces.pop())[0] != "{" and opened.end() > begin:
            begin, found = opened.end(), text[opened.end() : brace.start()]
    return found
