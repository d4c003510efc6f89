"""Stores the completions of an evaluation, so that an interrupted evaluation can resume."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rftmega.monitoring.observers.evaluate import Evaluated
from rftmega.monitoring.observers.evaluation_files import record_of
from rftmega.monitoring.observers.output_files import writing

Key = tuple[str, int, int]  # set, index of the prompt, number of the completion


class StoredCompletion(NamedTuple):
    """StoredCompletion is a scored completion."""

    key: Key
    scores: dict[str, float]  # reward components; empty for a lost rollout
    answer: str | None  # that votes in maj@k
    measures: dict[str, float]  # of the environment
    lost: str  # why it has no score


class Store:
    """Store keeps completions as JSON lines, in the format of a run's evaluations with the fields
    "scores" (not rounded), "measures" and "answer".
    """

    def __init__(self, path: Path, decode: Callable[[Sequence[int]], str]):
        """`decode`: returns the text of token ids."""
        self.path, self.decode = path, decode

    def read(self) -> dict[Key, StoredCompletion]:
        """Returns the stored completions, and cuts off a last line that was not written whole."""
        if not self.path.is_file():
            return {}
        with writing(self.path):
            content = self.path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                with self.path.open("r+b") as file:
                    file.truncate(len(whole))
        found = [_stored(json.loads(line)) for line in whole.splitlines()]
        return {each.key: each for each in found}

    def add(
        self, found: Iterable[tuple[Evaluated, str | None]], step: int | None
    ) -> dict[Key, StoredCompletion]:
        """Appends completions, each with its vote for maj@k. Returns them by key. `step`: the
        training step of the evaluated model, if known.
        """
        lines = [
            record_of(step or 0, each, self.decode)
            | {
                "scores": dict(each.scores),
                "measures": each.rollout.measures,
                "lost": each.rollout.lost,
                "answer": answer,
            }
            for each, answer in found
        ]
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                for line in lines:
                    text = json.dumps(line, ensure_ascii=False)
                    file.write(text.encode("utf-8", "backslashreplace") + b"\n")
                file.flush()
                os.fsync(file.fileno())
        return {each.key: each for each in map(_stored, lines)}


def _stored(line: dict[str, Any]) -> StoredCompletion:
    key = (line["set"], line["index"], line["sample"])
    return StoredCompletion(key, line["scores"], line["answer"], line["measures"], line["lost"])
