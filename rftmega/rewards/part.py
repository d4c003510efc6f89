"""Types of reward components."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rftmega.core.types import Trajectory


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer is one rollout's response as text, with the data needed to score it.

    `response` is without reasoning for all built-in components except "format"; `graded` is always
    without, None if the reasoning is unfinished. `label`: the ground truth, `kind`: the task type.
    The other fields are for the remote component, the judge and user-defined functions; a Rule
    never gets them.
    """

    response: str
    label: str
    kind: str = ""
    prompt_ids: tuple[int, ...] = ()
    completion_ids: Sequence[int] = ()
    record: str = ""  # see Prompt.record
    trajectories: tuple[Trajectory, ...] = ()
    graded: str | None = None  # the response without reasoning; None: unfinished reasoning


class Undecided(float):
    """Undecided is a score of 0 for a response whose correctness could not be determined.

    The fraction of undecided scores is a metric, and a run ends if the fraction is large
    (monitoring/observers/health.py).
    """


Decode = Callable[[Sequence[int]], str]
Rule = Callable[[str, str], float]  # (response, label) -> score
# one score per answer, in order, None if not applicable; called from several threads
Part = Callable[[Sequence[Answer]], Sequence[float | None]]


def each(rule: Rule) -> Part:
    """Returns a component that applies `rule`, a function (response, label) -> score, to every
    response on its own.
    """
    return lambda answers: [rule(answer.response, answer.label) for answer in answers]
