"""Completions of an evaluation as a table, of which the console shows some and wandb more."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rftmega.core.media_positions import unexpanded
from rftmega.monitoring.observers.evaluate import Evaluated
from rftmega.monitoring.observers.reward_check import LONGEST_ANSWER, LONGEST_TEXT, shown, spread

log = logging.getLogger(__name__)
MOST_ROWS = 100  # of the table


class ShownCompletion(NamedTuple):
    """ShownCompletion is a completion of an evaluation; the names of its fields are the table's columns."""

    step: int
    set: str  # the evaluation set, and the LoRA adapter if there are several
    place: int  # of the prompt in its set
    prompt: str
    response: str
    label: str
    reward: float | None
    scores: str  # reward components


class EvaluationTable:
    """EvaluationTable prints some completions of each evaluation, and keeps up to MOST_ROWS of the
    last one for wandb. It is a `Report` of `Evaluate`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, printed: int):
        """Stores the settings. `decode`: returns the text of token ids; `printed`: number of
        completions to print, at equal distances among all.
        """
        self.decode, self.printed = decode, printed
        self.step, self.rows = -1, list[ShownCompletion]()

    def __call__(self, step: int, found: Sequence[Evaluated]) -> None:
        scored = [each for each in found if not each.rollout.lost]
        places = range(len(scored))
        kept = spread(places, MOST_ROWS)
        self.step = step
        self.rows = [self._row(step, scored[at]) for at in places if at in kept]
        chosen = spread(range(len(self.rows)), self.printed)
        if chosen:
            log.info(
                "Evaluation %s: %d of %d completions.\n%s",
                f"after step {step}" if step else "before training",
                len(chosen),
                len(found),
                "\n".join(line_of(self.rows[at]) for at in sorted(chosen)),
            )

    def _row(self, step: int, found: Evaluated) -> ShownCompletion:
        prompt = found.prompt
        parts = {name: value for name, value in found.scores.items() if name != "reward"}
        return ShownCompletion(
            step,
            "_".join(filter(None, (found.adapter, found.name))),
            prompt.index,
            self.decode(unexpanded(prompt.token_ids, prompt.images)),
            self.decode(found.rollout.response_ids),
            prompt.label,
            found.scores.get("reward"),
            ", ".join(f"{name} {value:g}" for name, value in parts.items()),
        )


def line_of(row: ShownCompletion) -> str:
    """Returns the two lines that the console shows of a completion."""
    said = ["no reward" if row.reward is None else f"reward {row.reward:g}"]
    said[0] += f" ({row.scores})" if row.scores else ""
    said += [f"label {shown(row.label, LONGEST_ANSWER)}"] if row.label else []
    said += [f"set {row.set}"] if row.set else []
    said.append(f"prompt {shown(row.prompt, LONGEST_TEXT)}")
    return f"- {'; '.join(said)}\n  {shown(row.response, LONGEST_TEXT)}"
