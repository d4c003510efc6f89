"""Reader of the metrics that a run has written to metrics.jsonl."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from rftmega.core.errors import DataError

Step = Mapping[str, float | None]
"""Step is a line of metrics.jsonl: "step", "time" and metrics; None for values that were not
finite.
"""

# metrics that summarize a run
CHIEF = re.compile(r"eval_(?!seconds$).*|reward|loss|kl|entropy|response_length|logprob_gap_max")


# metric of the share of right completions of an evaluation; the prefix has the evaluation set
ACCURACY = re.compile(r"(eval_(?:.*_)?)accuracy")
CONFIG = "run.json"  # a run's options, in its output folder


class Change(NamedTuple):
    """Change holds the first and the last known value of a metric in a run, and the numbers of
    their steps.
    """

    first_step: int
    first: float
    last_step: int
    last: float


def read_history(path: Path) -> list[Step]:
    """Returns the lines of metrics.jsonl at `path`, one mapping of metrics per step; an empty list
    if the file does not exist on this host. The first line holds the metrics from before training.
    """
    if not path.is_file():
        return []
    *whole, _ = path.read_text().split("\n")  # the last line is still being written
    return [json.loads(line) for line in whole]


def graded_accuracies(history: Iterable[Step], part: str) -> set[str]:
    """Returns the metrics eval_accuracy that are no accuracy, since the scores of the reward
    component `part` that they count are graded: their mean is another number than the share of
    scores of 1 and more.
    """
    found = set()
    for line in history:
        for name, share in line.items():
            known = ACCURACY.fullmatch(name)
            mean = line.get(f"{known[1]}{part}") if known else None
            if None not in (mean, share) and mean != share:
                found.add(name)
    return found


def component_of(output: Path) -> str:
    """Returns the reward component trainer.eval_accuracy of the run in the folder `output`; "" if
    its options can't be read.
    """
    try:
        options = json.loads((output / CONFIG).read_text())
        return str(options["trainer"]["eval_accuracy"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def curves_of(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the values of the main metrics (see CHIEF) in metrics.jsonl at `path`, as metric name
    -> list of (step, value); empty if the file does not exist. Raises DataError if the file can't
    be read. Accuracies of graded rewards are left out.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    try:
        history = read_history(path)
        left_out = graded_accuracies(history, component_of(path.parent))
        for line in history:
            for name, value in line.items():
                if (
                    name not in left_out
                    and CHIEF.fullmatch(name)
                    and isinstance(value, int | float)
                ):
                    found.setdefault(name, []).append((int(line["step"] or 0), float(value)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} can't be read: {type(error).__name__}: {error}.") from error
    return dict(sorted(found.items()))


def changes(history: Iterable[Step], chosen: re.Pattern[str] = CHIEF) -> dict[str, Change]:
    """Returns the first and last value of metrics, by metric name. `history`: lines of
    metrics.jsonl (see `read_history`); `chosen`: pattern of the metrics' names, by default the main
    metrics.
    """
    found: dict[str, Change] = {}
    for line in history:
        step = int(line["step"] or 0)
        for name, value in line.items():
            if value is None or not chosen.fullmatch(name):
                continue
            begin = found.get(name, Change(step, value, step, value))
            found[name] = begin._replace(last_step=step, last=value)
    return dict(sorted(found.items()))
