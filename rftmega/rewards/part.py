"""Defines the parts that a reward is mixed from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rftmega.core.types import Trajectory


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer is one rollout's response as text.

    `response` is without reasoning where a built-in part but "format" is asked. The fields behind
    `kind` are for the remote part and for functions of a user's own; a rule never sees them.
    """

    response: str
    label: str
    kind: str = ""
    prompt_ids: tuple[int, ...] = ()
    completion_ids: Sequence[int] = ()
    record: str = ""  # see Prompt.record
    trajectories: tuple[Trajectory, ...] = ()
    graded: str | None = None  # the response without reasoning; None: the reasoning is not finished


class Undecided(float):
    """Undecided is a score of 0 that says nothing about the answer: whether it is right could not
    be found out.

    Its share is a metric of its own, and a run ends where it is large (monitoring/observers/health.py).
    """


Decode = Callable[[Sequence[int]], str]
Rule = Callable[[str, str], float]  # (response, label) -> score
# a score an answer, in their order, None where the part does not apply; called from several threads
Part = Callable[[Sequence[Answer]], Sequence[float | None]]


def each(rule: Rule) -> Part:
    """Returns a part that scores every answer on its own."""
    return lambda answers: [rule(answer.response, answer.label) for answer in answers]
