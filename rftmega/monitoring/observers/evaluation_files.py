"""Files with the completions of each evaluation: OUTPUT/evaluations/step_000100.jsonl.gz."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rftmega.core.media_positions import unexpanded
from rftmega.monitoring.observers.evaluate import Evaluated
from rftmega.monitoring.observers.output_files import set_aside, writing
from rftmega.monitoring.observers.trajectories import (
    LOGP_DIGITS,
    columns_of,
    name_of,
    rounded,
    write,
)


class EvaluationFiles:
    """EvaluationFiles writes a file per evaluation, with one JSON object per completion (see
    `record_of`). It is a `Report` of `Evaluate`.
    """

    def __init__(
        self, folder: str | Path, decode: Callable[[Sequence[int]], str], *, warn: bool = False
    ):
        """Stores the settings. `decode`: returns the text of token ids; `warn`: whether a file that
        can't be written is skipped with a warning instead of an error, see `writing`.
        """
        self.folder, self.decode, self.warn = Path(folder), decode, warn

    def __call__(self, step: int, found: Sequence[Evaluated]) -> None:
        path = self.folder / name_of(step)
        with writing(path, warn=self.warn):
            if not step:  # only a new run evaluates before its first step
                set_aside(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            write(path, (record_of(step, each, self.decode) for each in found))


def record_of(
    step: int, found: Evaluated, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """Returns a completion as a JSON-serializable object.

    "set" is the evaluation set's name and "adapter" the LoRA adapter's, both "" if there is one
    alone; "index" is the prompt's number in its set and "sample" that of the completion. "tokens"
    are those of the response that rewards score, whose text is "response". "lost" is the reason why
    a rollout has no score. `decode`: returns the text of token ids.
    """
    rollout, prompt = found.rollout, found.prompt
    return {
        "step": step,
        "set": found.name,
        "adapter": found.adapter,
        "index": prompt.index,
        "sample": found.sample,
        "prompt": decode(unexpanded(prompt.token_ids, prompt.images)),
        "label": prompt.label,
        **({"columns": columns} if (columns := columns_of(prompt)) else {}),
        **(
            {"lost": rollout.lost}
            if rollout.lost
            else {
                "response": decode(rollout.response_ids),
                "tokens": rollout.response_ids,
                "truncated": rollout.truncated,
                "scores": {
                    name: rounded(value, LOGP_DIGITS) for name, value in found.scores.items()
                },
            }
        ),
    }
