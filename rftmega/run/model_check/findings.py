"""Findings of `rftmega check`: one line per check, with the cause of a problem and its remedy."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from rftmega.core.errors import RFTMegaError, described

State = Literal["ok", "problem", "note", "skipped"]
WIDTH = 110  # columns of the table
COLUMN = 22  # of the names of checks


class Finding(NamedTuple):
    """Finding is the result of one check.

    A finding of the state "note" is no problem, but a property of the folder that matters to some
    runs.
    """

    check: str
    state: State
    said: str  # the result, the cause of a problem, or why the check was skipped
    change: str = ""  # how to remove a problem


def ok(check: str, said: str) -> Finding:
    return Finding(check, "ok", said)


def note(check: str, said: str, change: str = "") -> Finding:
    return Finding(check, "note", said, change)


def skipped(check: str, why: str) -> Finding:
    return Finding(check, "skipped", why)


def problem(check: str, cause: str, change: str = "") -> Finding:
    return Finding(check, "problem", cause, change)


def raised(check: str, error: BaseException) -> Finding:
    """Converts an exception that a check raised into a problem. Messages of this package's own
    errors are taken whole, since they name cause and remedy.
    """
    if isinstance(error, RFTMegaError):
        return problem(check, " ".join(str(error).split()))
    first = (described(error).strip().splitlines() or [type(error).__name__])[0]
    return problem(check, f"{first[:300]}", "Compare the folder with the one it was made from.")


def table(findings: Sequence[Finding]) -> str:
    """Returns the findings as a table with a last line that counts the problems."""
    lines = [line for each in findings for line in _lines(each)]
    problems = sum(each.state == "problem" for each in findings)
    lines.append(f"{problems} problem(s) in {len(findings)} checks" if problems else "no problem")
    return "\n".join(lines) + "\n"


def _lines(finding: Finding) -> Iterator[str]:
    start = f"{finding.check:<{COLUMN}}{finding.state:<9}"
    indent = " " * len(start)
    yield from textwrap.wrap(
        start + finding.said,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    ) or [start]
    if finding.change:
        yield from textwrap.wrap(
            finding.change,
            WIDTH,
            initial_indent=indent + "-> ",
            subsequent_indent=indent + "   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
