"""Math reward: math-verify compares expressions in worker processes, because it can limit its time
only by signals to a main thread.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rftmega.rewards.part import Answer, Undecided
from rftmega.rewards.scorer_process import ScorerPool, ScorerProcess

LABEL_SECONDS = 60.0  # time limit for parsing a label, before training on a busy machine
NUMBER = re.compile(r"-?\d+(\.\d+)?")  # labels that certainly can be parsed
SCRIPT = Path(__file__).with_name("math_worker.py")


class MathWorker(ScorerProcess):
    """MathWorker runs one worker process that compares expressions."""

    def __init__(self, seconds: float):
        # -P: keeps math.py beside the script from shadowing the module math
        command = [sys.executable, "-P", str(SCRIPT)]
        super().__init__(command, seconds, part="reward.math", hint="is math-verify there?")

    def equal(self, response: str | None, label: str) -> float:
        """Returns 1 if the response's last expression equals the label's expression, 0 otherwise.
        For a response None, returns 1 if the label can be parsed as an expression, else 0.

        Returns Undecided if the comparison takes too long or ends the process. Raises RewardError
        if the process cannot be started.
        """
        said = self.ask([response, label, self.seconds])
        return Undecided() if said is None else float(said)

    def answer_in(self, response: str) -> str | None:
        """Returns the source of the response's last expression, which is compared with labels; None
        if there is none or reading takes too long. Raises RewardError if the process cannot be
        started.
        """
        said: Any = self.ask([response, None, self.seconds])
        return said if isinstance(said, str) and said else None


class MathPart(ScorerPool[MathWorker]):
    """MathPart is the reward component that compares responses with labels by math-verify;
    `seconds`: time limit of one comparison.
    """

    def __init__(self, *, workers: int, seconds: float):
        super().__init__(lambda: MathWorker(seconds), workers=workers, name="math-reward")

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        asked = [(answer.response, answer.label) for answer in answers]
        return self.map(lambda worker, each: worker.equal(*each), asked)

    def read(self, labels: Sequence[str]) -> list[float]:
        """Returns one score per label: 1 if it can be parsed as an expression, else 0."""
        return self.map(lambda worker, label: worker.equal(None, label), labels)

    def answer_in(self, response: str) -> str | None:
        """Returns the source of the expression in a response that is compared with labels; None if
        there is none.
        """
        with self.lent() as worker:
            return worker.answer_in(response)


def complaints(labels: Iterable[str], *, workers: int) -> dict[str, str]:
    """Returns label -> error message for the labels that cannot be parsed as expressions; parses in
    `workers` processes.
    """
    unsure = [label for label in dict.fromkeys(labels) if not NUMBER.fullmatch(label)]
    part = MathPart(workers=workers, seconds=LABEL_SECONDS)
    try:
        read = part.read(unsure)
    finally:
        part.close()
    return {
        label: f"the label {label!r} holds no expression that math-verify can read: write one in LaTeX, or plain"
        for label, found in zip(unsure, read, strict=True)
        if not found
    }
