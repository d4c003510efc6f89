"""Files with the samples that steps trained on, token by token, which `zcat` and `rftmega view`
can show.
"""

import gzip
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rftmega.core.media_positions import Placed, PlacedImage, unexpanded
from rftmega.core.ragged import Ragged
from rftmega.core.types import Experience, Metrics, Prompt, Samples, Turn
from rftmega.data.media.thumbnails import thumbnail_of
from rftmega.monitoring.observers.observer import Observer
from rftmega.monitoring.observers.output_files import set_aside, synchronise, writing
from rftmega.monitoring.observers.run_chat import RunChat

log = logging.getLogger(__name__)
LOGP_DIGITS, DIGITS = 7, 4  # significant digits; float32 has 7
# (context, response) in token ids -> the text that rewards grade; None: unfinished reasoning
Grading = Callable[[Sequence[int], Sequence[int]], str | None]


class Trajectories(Observer):
    """Trajectories is a callback that writes folder/step_000123.jsonl.gz, with one JSON object per
    sample of the step (see `records`), after the first, every `every`-th and the last step.

    A file gets its final name when it is complete. If all files together exceed `most_bytes`, the
    oldest ones are deleted; the newest file is always kept.
    """

    def __init__(
        self,
        folder: str | Path,
        decode: Callable[[Sequence[int]], str],
        pieces: Callable[[Sequence[int]], list[str]],
        *,
        every: int,
        most_bytes: int,
        last: int = 0,
        chat: RunChat | None = None,
        grading: Grading | None = None,
        warn: bool = False,
    ):
        """Stores the settings. `decode`: returns the text of token ids; `pieces`: returns the text
        of each token. `every`: steps from one file to the next; `last`: number of the last step, 0
        if it is not known; `most_bytes`: limit on all files together. `chat`: the settings by which
        messages are converted into tokens, written to chat.json. `grading`: returns the part of a
        response that rewards grade, see Grading. `warn`: whether a file that can't be written is
        skipped with a warning instead of an error, see `writing`.
        """
        self.warn = warn
        self.folder = Path(folder)
        self.chat, self.grading = chat, grading
        self.decode, self.pieces = decode, pieces
        self.every, self.last, self.most_bytes = every, last, most_bytes

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        """Prepares the folder: a new run renames the folder of an earlier run; a resumed run
        removes the files of the steps that it repeats.
        """
        with writing(self.folder):
            self._begin(trainer)

    def _begin(self, trainer: Any) -> None:
        if not trainer.resumed:
            set_aside(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if later := [path for path in self._written() if path.name >= name_of(trainer.step + 1)]:
            log.info(
                "%s: files of %d step(s) after %d go: these are done again.",
                self.folder,
                len(later),
                trainer.step,
            )
        for path in later:
            path.unlink()
        if self.chat:
            self.chat.write(self.folder)

    def on_save(self, trainer: Any) -> None:
        with writing(self.folder, warn=self.warn):
            synchronise(self.folder)

    def on_experience(
        self, trainer: Any, samples: Samples[Ragged], experience: Experience[Ragged]
    ) -> None:
        if trainer.step in (1, self.last) or trainer.step % self.every == 0:
            lines = records(
                trainer.step, samples, experience, self.decode, self.pieces, self.grading
            )
            path = self.folder / name_of(trainer.step)
            with writing(path, warn=self.warn):
                write(path, lines)
                self._trim()

    def _trim(self) -> None:
        sizes = {path: path.stat().st_size for path in self._written()}
        for path in list(sizes)[:-1]:
            if sum(sizes.values()) <= self.most_bytes:
                return
            path.unlink()
            del sizes[path]

    def _written(self) -> list[Path]:
        return sorted(self.folder.glob("step_*.jsonl.gz"))


def name_of(step: int) -> str:
    return f"step_{step:06d}.jsonl.gz"


def write(path: Path, lines: Iterator[dict[str, Any]]) -> None:
    """Writes each of `lines` as a line of JSON into the gzip file `path`. Equal lines always give
    the same bytes.

    Raises OSError if the file can't be written, and then leaves no partial file.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        _write(draft, lines)
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _write(draft: Path, lines: Iterator[dict[str, Any]]) -> None:
    with draft.open("wb") as raw:
        with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=6, mtime=0) as packed:
            for line in lines:
                packed.write(
                    (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode(
                        "utf-8", "backslashreplace"
                    )
                )
        raw.flush()
        os.fsync(raw.fileno())


def records(
    step: int,
    samples: Samples[Ragged],
    experience: Experience[Ragged],
    decode: Callable[[Sequence[int]], str],
    pieces: Callable[[Sequence[int]], list[str]],
    grading: Grading | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields one JSON-serializable object per row (token sequence) of `samples`, the samples that
    step `step` trained on. `experience`: their old log-probs, advantages and entropies; `decode`:
    returns the text of token ids; `pieces`: returns the text of each token; `grading`: returns the
    part of a response that rewards grade. Keys of an object:

    "tokens" holds a list for each quantity, with one value per token of the response. In it,
    "chosen" is false for tokens that the environment inserted. Log-probs are in nats; "gap" is the
    engine's log-prob minus the trainer's; "teacher NAME" is a teacher's log-prob minus the
    trainer's; null stands for values that are unknown or not finite.

    "images" lists the prompt's images, each of which has one placeholder in the prompt's text:
    digest, path (null if the image was given as bytes), grid, and a thumbnail in the first object
    of a file in which the image occurs. Waveforms are listed with the number of their frames.

    "graded" is the part of the response that rewards grade, null if its reasoning is unfinished;
    only a rollout's last trajectory has it.

    "rollout" is the rollout's number. If a rollout has several rows, "trajectory" is the index of
    this row, from 0, and "trajectories" the number of rows. "turns" lists the turns with their
    positions among the tokens of the response; "columns" are those of the data record without
    prompt and label; "messages" are the prompt's chat messages; "measures" are numbers that the
    environment reported. Each of these keys is present only if its value is known.
    """
    assert experience.old_logp is not None, "a rollout that was learnt from has been scored"
    shown: set[str] = set()
    places = places_of(samples)
    for row in range(len(samples)):
        first, end = int(samples.rows.prompt_lengths[row]), int(samples.rows.lengths[row])
        ids = samples.rows.tokens[row].tolist()
        targets = slice(first - 1, end - 1)  # positions of the response
        chosen = samples.rows.mask[row][targets]
        engine, trainer = samples.behaviour_logp[row], experience.old_logp[row]

        def of(
            values: Tensor,
            digits: int = DIGITS,
            targets: slice = targets,
            chosen: Tensor = chosen,
        ) -> list[float | None]:
            known = values[targets].double().masked_fill(~chosen, math.nan)
            return [rounded(value, digits) for value in known.tolist()]

        images = samples.prompts[row].images
        yield {
            "step": step,
            "group": int(samples.group[row]),
            **places[row],
            "index": samples.prompts[row].index,
            "prompt": "".join(pieces(unexpanded(ids[:first], images))),
            "response": decode(ids[first:]),
            **graded(samples, row, places[row], grading),
            "label": samples.prompts[row].label,
            "reward": rounded(samples.reward[row].item(), LOGP_DIGITS),
            "reward_parts": {
                k: rounded(part[row].item(), LOGP_DIGITS)
                for k, part in samples.reward_parts.items()
            },
            "truncated": bool(samples.truncated[row]),
            **told(samples, row, first),
            **({"images": [described(each, shown) for each in images]} if images else {}),
            "tokens": {
                "id": ids[first:],
                "text": pieces(ids[first:]),
                "engine_logp": of(engine, LOGP_DIGITS),
                "trainer_logp": of(trainer, LOGP_DIGITS),
                "gap": of(engine - trainer),
                "advantage": of(experience.advantage[row]),
                "entropy": None if experience.entropy is None else of(experience.entropy[row]),
                "chosen": chosen.tolist(),
                **{
                    f"teacher {name}": of(logp[row] - trainer)
                    for name, logp in experience.teacher_logp.items()
                },
            },
        }


def places_of(samples: Samples[Ragged]) -> list[dict[str, int]]:
    """Returns for each row of `samples` which part of which rollout it is: the rollout's number
    ("rollout") and, if the rollout has several rows, the row's index among them ("trajectory") and
    their number ("trajectories").
    """
    if samples.rollout is None:
        return [{} for _ in range(len(samples))]
    rows = samples.rollouts
    found = []
    for row, number in enumerate(samples.rollout.tolist()):
        own = rows.of_row[row]
        place = {"rollout": number}
        if rows.sizes[own] > 1:
            place["trajectory"] = row - int(rows.first[own])
            place["trajectories"] = int(rows.sizes[own])
        found.append(place)
    return found


def told(samples: Samples[Ragged], row: int, first: int) -> dict[str, Any]:
    """Returns the turns of a row ("turns"), the columns of its data record ("columns"), the chat
    messages of its prompt ("messages") and the numbers that its environment reported ("measures");
    unknown values have no key.

    `row`: index of the row in `samples`; `first`: position of the response's first token in the
    row.
    """
    turns: Sequence[Turn] = samples.turns[row] if samples.turns else ()
    counted = {name: rounded(each[row].item(), DIGITS) for name, each in samples.measures.items()}
    found = {
        "turns": [described_turn(turn, first) for turn in turns if turn.start >= first],
        "measures": {name: value for name, value in counted.items() if value is not None},
        "columns": columns_of(samples.prompts[row]),
        "messages": messages_in(samples.prompts[row].record),
    }
    return {name: value for name, value in found.items() if value}


def graded(
    samples: Samples[Ragged], row: int, place: dict[str, int], grading: Grading | None
) -> dict[str, Any]:
    """Returns {"graded": text} with the text that rewards grade in a row's last assistant turn, or
    in the whole response if the row has no turns; an empty dictionary without `grading`, or if the
    row is not the last of its rollout.

    `row`: index of the row in `samples`; `place`: the row's entry of `places_of`; `grading`:
    returns the text for token ids, see Grading.
    """
    if grading is None or place.get("trajectory", 0) + 1 != place.get("trajectories", 1):
        return {}
    ids = samples.rows.tokens[row].tolist()
    turns = samples.turns[row] if samples.turns else ()
    begin, end = int(samples.rows.prompt_lengths[row]), len(ids)
    for turn in turns:
        if turn.role == "assistant":
            begin, end = turn.start, turn.stop
    return {"graded": grading(ids[:begin], ids[begin:end])}


def described_turn(turn: Turn, first: int) -> dict[str, Any]:
    """Returns a turn as a JSON object, with positions relative to `first`, the position of the
    response's first token in the row.
    """
    return {
        "role": turn.role,
        "name": turn.name,
        "start": turn.start - first,
        "stop": turn.stop - first,
        "reward": rounded(turn.reward, LOGP_DIGITS),
    }


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """Returns the columns of a prompt's data record without prompt and label; empty if they are
    unknown.
    """
    if not prompt.record:
        return {}
    columns = json.loads(prompt.record, parse_constant=str)  # NaN, which the file can't hold
    text = columns.pop("prompt", None)
    return {
        name: value
        for name, value in columns.items()
        if value != text and not (isinstance(value, str) and value == prompt.label)
    }


def messages_in(record: str) -> list[dict[str, Any]]:
    """Returns the chat messages of a prompt. `record`: the data record of the prompt as JSON; "" if
    unknown, for which an empty list is returned.
    """
    prompt = json.loads(record).get("prompt") if record else None
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt if isinstance(prompt, list) else []


def described(image: Placed, shown: set[str]) -> dict[str, Any]:
    """Returns an image or a waveform as a JSON object. An image gets a thumbnail, unless its digest
    is in `shown`, the digests of images that already had one, to which it is then added.
    """
    found: dict[str, Any] = {
        "digest": image.digest,
        "path": image.source if isinstance(image.source, str) else None,
    }
    if not isinstance(image, PlacedImage):
        return found | {"frames": image.frames}
    found["grid"] = list(image.grid)
    if image.digest not in shown:
        shown.add(image.digest)
        found["thumbnail"] = thumbnail_of(image)
    return found


def rounded(value: float, digits: int) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
