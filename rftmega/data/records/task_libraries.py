"""Records of the tasks that a library creates ("reasoning_gym://chain_sum?size=5000")."""

import json
import logging
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

from rftmega.config.task_libraries import (
    GAMES,
    TaskSource,
    refusal,
    worker_command,
    worker_environment,
)
from rftmega.core.errors import DataError
from rftmega.data.records.values import Record

log = logging.getLogger(__name__)
SHOWN = 400  # last characters of a failed process's error output


def library_records(name: str, source: TaskSource) -> Iterator[tuple[str, Record]]:
    """Yields (location, record) for each distinct task of the data source `name`, parsed as
    `source`. The same tasks come in every process: `seed` is 0 unless given.

    A record has the question as "prompt" and "question", the library's answer as "label" and
    "answer", its "metadata", the library's name as "kind", and "task_source" and "task_index", by
    which the library's scorer finds the task again. Raises DataError if the library is not
    installed, or does not know the tasks or a parameter.
    """
    if why := refusal(source):
        raise DataError(f"{name}: {why}")
    if source.library in GAMES:
        yield from _games(name, source)
        return
    for told in _told(name, source.tasks):
        if "error" in told:
            raise DataError(f"{name}: {told['error']}")
        if "duplicates" in told:
            if told["duplicates"]:
                log.info("%s: left out %d tasks that occurred before", name, told["duplicates"])
            continue
        question, answer, index = told["question"], told["answer"], told["index"]
        yield (
            f"{name} task {index}",
            {
                "prompt": question,
                "label": answer,
                "question": question,
                "answer": answer,
                "metadata": told["metadata"],
                "kind": source.library,
                "task_source": name,
                "task_index": index,
            },
        )


def _games(name: str, source: TaskSource) -> Iterator[tuple[str, Record]]:
    """Yields (location, record) for each game that the environment of the library plays: `size`
    games (500 by default) with the seeds from `seed` (0 by default). All other parameters are
    passed to the game.
    """
    game, _, query = source.tasks.partition("?")
    given = {key: _literal(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    size, seed = given.pop("size", 500), given.pop("seed", 0)
    for parameter, value in (("size", size), ("seed", seed)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise DataError(f"{name}: {parameter}={value} must be a whole number, 0 or more.")
    for number in range(seed, seed + size):
        task = {"game": game, "seed": number, "parameters": given}
        prompt = f"{game}, seed {number}"  # the environment asks
        yield (
            f"{name} game {number}",
            {"prompt": prompt, "label": "", "kind": source.library, "task": task},
        )


def _literal(text: str) -> Any:
    """Returns the number, truth value or text that a parameter of a game means."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def _told(name: str, tasks: str) -> Iterator[dict[str, Any]]:
    """Starts a process of the task library, and yields the JSON objects that the process prints:
    tasks, the number of duplicates, or an error. The process ends with the iterator.

    `name`: the data source, for error messages; `tasks`: which tasks to create, such as
    "chain_sum?size=5000". Raises DataError if the process fails.
    """
    command = worker_command("records", tasks)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            env=worker_environment(),
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
            if process.wait():
                errors.seek(0)
                said = errors.read().decode(errors="replace")[-SHOWN:].strip()
                raise DataError(
                    f"{name}: the library's process ended with status {process.returncode}: {said}"
                )
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
