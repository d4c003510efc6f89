"""Shows a few completions of the first step with their rewards, before anything is trained on them."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rftmega.core.ragged import Ragged
from rftmega.core.types import Prompt, Samples
from rftmega.monitoring.observers.health import UNDECIDED
from rftmega.monitoring.observers.observer import Observer
from rftmega.monitoring.observers.trajectories import Grading, graded, places_of

log = logging.getLogger(__name__)
SHOWN = 10  # completions
LONGEST_TEXT, LONGEST_ANSWER = 400, 100  # characters
# (prompt, response as rewards grade it) -> component -> the answer that it reads, None for no answer
Extracting = Callable[[Prompt, str], Mapping[str, str | None]]


class RewardCheck(Observer):
    """RewardCheck is a callback that logs SHOWN completions of a new run's first step, with the
    answers that reward components read in them and with their rewards, before the first update. It
    warns if all completions of the step have the same reward.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        grading: Grading | None = None,
        extracting: Extracting | None = None,
    ):
        """`decode`: returns the text of token ids. `grading`: returns the part of a response that
        rewards grade, see Grading. `extracting`: see Extracting.
        """
        self.decode, self.grading, self.extracting = decode, grading, extracting
        self.done = False

    def on_rollouts(self, trainer: Any, samples: Samples[Ragged]) -> None:
        if self.done or trainer.resumed:
            return
        self.done = True
        rows = last_rows(samples)
        chosen = spread(rows, SHOWN)
        lines = [
            self._line(samples, row, place)
            for row, place in zip(range(len(samples)), places_of(samples), strict=True)
            if row in chosen
        ]
        if alike := ", ".join(equal_parts(samples, rows)):
            lines.append(f"Equal for all {len(rows)}: {alike}.")
        log.info(
            "Reward check: %d of the %d completions of the first step, before the first update.\n%s",
            len(chosen),
            len(rows),
            "\n".join(lines),
        )
        rewards = samples.reward[rows]
        if len(rows) > 1 and bool((rewards == rewards[0]).all()):
            log.warning(
                "Reward check: all %d completions of the first step have the reward %g. Usually the reward never fires. "
                "Look at the completions above: does the reward read the answer that they give (reward.answer_pattern, "
                "reward.format_pattern, reward.reasoning_markers; docs/rewards.md), are labels in the form that it compares, "
                "are completions cut off before the answer (rollout.max_response_tokens), does the prompt ask for that form? "
                "If all this is right, prompts are all too hard or too easy.",
                len(rows),
                rewards[0].item(),
            )

    def _line(self, samples: Samples[Ragged], row: int, place: dict[str, int]) -> str:
        """Returns the description of one completion. `row`: its last row in `samples`; `place`: the
        row's entry of `places_of`.
        """
        prompt, first = samples.prompts[row], int(samples.rows.prompt_lengths[row])
        parts = {name: each[row].item() for name, each in samples.reward_parts.items()}
        known = ", ".join(
            f"{name} {value:g}" for name, value in parts.items() if tells(name, value)
        )
        said = [f"reward {samples.reward[row].item():g}" + (f" ({known})" if known else "")]
        if prompt.label:
            said.append(f"label {shown(prompt.label, LONGEST_ANSWER)}")
        text = graded(samples, row, place, self.grading).get("graded")
        if self.grading is not None and text is None:
            said.append("unfinished reasoning")
        elif text is not None and self.extracting is not None:
            said += [
                f"{name} reads {'no answer' if answer is None else shown(answer, LONGEST_ANSWER)}"
                for name, answer in self.extracting(prompt, text).items()
            ]
        whole = self.decode(samples.rows.tokens[row].tolist()[first:])
        cut = " [cut off by its length]" if bool(samples.truncated[row]) else ""
        return f"- {'; '.join(said)}\n  {shown(whole, LONGEST_TEXT)}{cut}"


def tells(name: str, value: float) -> bool:
    """Returns whether a completion has a score of this name and it is worth telling."""
    return not math.isnan(value) and not (name.endswith(UNDECIDED) and value == 0)


def equal_parts(samples: Samples[Ragged], rows: Sequence[int]) -> list[str]:
    """Returns the names and scores of the components that scored `rows` all alike, if there are
    several.
    """
    if len(rows) < 2:
        return []
    columns = {name: each[rows] for name, each in samples.reward_parts.items()}
    return [
        f"{name} {each[0].item():g}"
        for name, each in columns.items()
        if tells(name, each[0].item()) and bool((each == each[0]).all())
    ]


def last_rows(samples: Samples[Ragged]) -> list[int]:
    """Returns the index of the last row of each rollout."""
    rollouts = samples.rollouts
    return [
        int(first) + int(size) - 1
        for first, size in zip(rollouts.first, rollouts.sizes, strict=True)
    ]


def spread(rows: Sequence[int], most: int) -> set[int]:
    """Returns up to `most` of `rows`, at equal distances, so that they belong to many prompts."""
    number = min(most, len(rows))
    return {rows[at * len(rows) // number] for at in range(number)}


def shown(text: str, longest: int) -> str:
    """Returns untrusted text in quotes on one line: control characters are escaped, and the middle
    of a text longer than `longest` characters is left out.
    """
    if len(text) > longest:
        head, tail = text[: longest // 3], text[len(text) - (longest - longest // 3) :]
        return f"{shown(head, longest)} [...] {shown(tail, longest)}"
    plain = (
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
    return f'"{"".join(plain)}"'
