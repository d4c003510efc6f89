"""Creates tasks of the library reasoning_gym, and scores answers with the library's scorers:

    python -m rftmega.sandbox.reasoning_gym_worker records TASKS
    python -m rftmega.sandbox.reasoning_gym_worker score

TASKS is DATA_SET?PARAMETER=VALUE&... The first command writes one line of JSON per task, {"index",
"question", "answer", "metadata"}, then {"duplicates": number}; or {"error": message}. The second
one writes "ready" and answers each line [TASKS, index, answer, seconds] on its standard input with
{"score": number}, {"raised": message} or {"lost": why}.

Some scorers of the library evaluate the answer as Python, so each answer is scored in a forked,
confined process. Code in an answer can't reach files or the network, but it could forge the score
of this answer.
"""

import contextlib
import dataclasses
import difflib
import enum
import functools
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import types
import typing
from collections.abc import Iterator, Sequence
from urllib.parse import parse_qsl

from rftmega.sandbox import confine

MEMORY = 4 << 30  # bytes of address space
LARGEST_TOLD = 200  # characters of a message
LARGEST_SCORE = 1e6  # no scorer gives more
WORDS = {"true": True, "false": False}
MEANT = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
LEVEL = "level"  # of the data set's curriculum; level.ATTRIBUTE: of one attribute


class TasksRefused(Exception):
    """Raised for a data set or a parameter that can't be used; the message says why."""


@functools.lru_cache(64)
def data_set(tasks: str) -> typing.Any:
    """Returns the library's data set for `tasks`. Raises TasksRefused for an unknown data set, and for
    parameters that it does not accept.
    """
    library = importlib.import_module("reasoning_gym")
    factory = importlib.import_module("reasoning_gym.factory")
    name, _, query = tasks.partition("?")
    if name not in factory.DATASETS:
        near = difflib.get_close_matches(name, factory.DATASETS, n=3, cutoff=0.5)
        hint = (
            f"Did you mean {' or '.join(near)}?"
            if near
            else f"Known: {', '.join(sorted(factory.DATASETS))}."
        )
        raise TasksRefused(f"{name!r} is no data set of reasoning_gym. {hint}")
    config = factory.DATASETS[name][1]
    given = parse_qsl(query, keep_blank_values=True)
    values, levels, problems = parsed(name, config, given)
    if problems:
        raise TasksRefused(f"{' '.join(problems)} {accepted(name, config)}")
    try:
        if levels:
            values = of_curriculum(factory, name, levels) | values
        return library.create_dataset(name, **values)
    except TasksRefused:
        raise
    except Exception as error:  # a validation of the library's, of any type
        raise TasksRefused(
            f"{name} refuses the parameters: {told(error)}. {accepted(name, config)}"
        ) from error


def parsed(
    name: str, config: type, given: Sequence[tuple[str, str]]
) -> tuple[dict[str, typing.Any], dict[str, int], list[str]]:
    """Returns (parameters, levels, problems) of the query `given`; the seed is 0 unless given."""
    hints = typing.get_type_hints(config)
    known = [field.name for field in dataclasses.fields(config) if field.init]
    values: dict[str, typing.Any] = {"seed": 0} if "seed" in known else {}
    levels: dict[str, int] = {}
    problems = [
        f"{parameter} is given twice."
        for parameter in {key for key, _ in given if [k for k, _ in given].count(key) > 1}
    ]
    for parameter, text in given:
        is_level = parameter not in known and parameter.partition(".")[0] == LEVEL
        if parameter not in known and not is_level:
            near = difflib.get_close_matches(parameter, known, n=1)
            problems.append(
                f"{parameter} is no parameter of {name}.{f' Did you mean {near[0]}?' if near else ''}"
            )
            continue
        try:
            if is_level:
                levels[parameter.partition(".")[2]] = int(text)
            else:
                values[parameter] = value_of(text, hints[parameter])
        except ValueError:
            meant = MEANT[int] if is_level else meaning(hints[parameter])
            problems.append(f"{parameter}={text} must be {meant}.")
    if values.get("seed", 0) is None:
        problems.append(
            "seed must be a number: without one, each process would create other tasks."
        )
    return values, levels, problems


def value_of(text: str, kind: typing.Any) -> typing.Any:
    """Returns the value of type `kind` that `text` means. Raises ValueError if it means none."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if text.lower() == "none" else value_of(text, inner[0])
    if origin is typing.Literal:
        return (
            next(each for each in inner if str(each) == text)
            if text in map(str, inner)
            else _bad(text)
        )
    if kind is bool:
        return WORDS[text.lower()] if text.lower() in WORDS else _bad(text)
    if kind in (int, float, str):
        return kind(text)
    if isinstance(kind, enum.EnumMeta):
        return kind(text)
    collection = origin or kind
    if collection in (list, tuple, Sequence):
        items = [_item(each, inner[0] if inner else None) for each in text.split(",") if each]
        return items if collection is list else tuple(items)
    return _bad(text)


def _item(text: str, kind: typing.Any) -> typing.Any:
    if kind is not None:
        return value_of(text, kind)
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _bad(text: str) -> typing.NoReturn:
    raise ValueError(text)


def meaning(kind: typing.Any) -> str:
    """Returns what a parameter of this type must be, for messages."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return f"{meaning(inner[0])}, or none"
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, inner))}"
    if isinstance(kind, enum.EnumMeta):
        members: list[enum.Enum] = list(kind)
        return f"one of {', '.join(str(each.value) for each in members)}"
    if (origin or kind) in (list, tuple, Sequence) and (not inner or inner[0] in MEANT):
        return "a list, as a,b"
    return MEANT.get(kind, "something that an address can't hold; leave it out")


def accepted(name: str, config: type) -> str:
    """Returns the parameters that a data set accepts, with their defaults, for messages."""
    hints = typing.get_type_hints(config)
    fields = ", ".join(
        f"{field.name} ({meaning(hints[field.name]).partition(';')[0]})"
        for field in dataclasses.fields(config)
        if field.init
    )
    return f"{name} accepts: {fields}; and {LEVEL} (a whole number), if it has a curriculum."


def of_curriculum(factory: typing.Any, name: str, levels: dict[str, int]) -> dict[str, typing.Any]:
    """Returns the parameters of a data set at the levels of its curriculum's attributes; the level
    of the attribute "" is that of all attributes not named.

    Raises TasksRefused if there is no such curriculum, attribute or level.
    """
    if not factory.has_curriculum(name):
        raise TasksRefused(f"{name} has no curriculum, so it has no {LEVEL}.")
    curriculum = factory.create_curriculum(name)
    sizes = {each: len(attribute.levels) for each, attribute in curriculum.attributes.items()}
    for attribute, level in levels.items():
        if attribute and attribute not in sizes:
            raise TasksRefused(
                f"{LEVEL}.{attribute}: the curriculum of {name} has no such attribute, but {', '.join(sizes)}."
            )
        most = sizes[attribute] if attribute else max(sizes.values())
        if not 0 <= level < most:
            raise TasksRefused(
                f"{LEVEL}={level} must be from 0 to {most - 1} for {attribute or name}."
            )
    for attribute, size in sizes.items():
        if (level := levels.get(attribute, levels.get("", -1))) >= 0:
            curriculum.set_attr_level(attribute, min(level, size - 1))
    made = curriculum.generate_configuration()
    return {
        field.name: getattr(made, field.name)
        for field in dataclasses.fields(made)
        if field.init and field.name not in ("seed", "size")
    }


def created(tasks: str) -> Iterator[dict[str, typing.Any]]:
    """Yields the distinct tasks in order, then the number of tasks that were left out because their
    question occurred before. Raises TasksRefused as `data_set` does, and if a task can't be created.
    """
    made, seen, duplicates = data_set(tasks), set[str](), 0
    for index in range(len(made)):
        try:
            entry = made[index]
            question, answer = str(entry["question"]), str(entry["answer"])
        except Exception as error:  # the library's, of any type
            raise TasksRefused(f"task {index} can't be created: {told(error)}.") from error
        if question in seen:
            duplicates += 1
            continue
        seen.add(question)
        metadata = entry.get("metadata", {})
        yield {"index": index, "question": question, "answer": answer, "metadata": metadata}
    yield {"duplicates": duplicates}


@functools.lru_cache(256)
def task(tasks: str, index: int) -> typing.Any:
    """Returns a task of the library's, and scores the library's own answer to it once, in this
    process: what a scorer imports only when needed could not be imported later.
    """
    made = data_set(tasks)
    entry = made[index]
    with contextlib.suppress(Exception):
        made.score_answer(entry["answer"], entry)
    return entry


def scored(tasks: str, index: int, answer: str | None, seconds: float) -> dict[str, typing.Any]:
    """Returns the reply to a request (see this module): the score of `answer`, which the library
    computes within `seconds` in a confined process.
    """
    try:
        made, entry = data_set(tasks), task(tasks, index)
    except Exception as error:  # a record that was not made by this version of the library
        return {"lost": told(error)}
    read, write = os.pipe()
    with tempfile.TemporaryDirectory() as own:
        child = os.fork()
        if child == 0:
            _score_confined(made, entry, answer, seconds, own, write)
        os.close(write)
        said = b""
        with os.fdopen(read, "rb", buffering=0) as pipe:
            ready, _, _ = select.select([pipe], [], [], seconds)
            said = pipe.read(4096) if ready else b""
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not said:
        return {"lost": "too long" if not ready else "the process ended"}
    return reply_of(said)


def reply_of(said: bytes) -> dict[str, typing.Any]:
    """Returns the reply that a confined process wrote; code in an answer can write there as well,
    and then anything.
    """
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        return {"lost": "no reply"}
    if not isinstance(found, dict):
        return {"lost": "no reply"}
    score, raised = found.get("score"), found.get("raised")
    if isinstance(score, int | float) and abs(score) < LARGEST_SCORE:
        return {"score": float(score)}
    return {"raised": raised} if isinstance(raised, str) else {"lost": "no reply"}


def _score_confined(
    made: typing.Any, entry: typing.Any, answer: str | None, seconds: float, own: str, pipe: int
) -> typing.NoReturn:
    """Scores `answer` in this forked process and writes the reply to `pipe`. `own`: the only folder
    that may be written to.
    """
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        confine.keep_only([pipe])
        os.chdir(own)
        confine.limit(seconds=seconds, memory=MEMORY)
        confine.drop_privileges(os.getuid())
        confine.restrict_files(own)
        confine.filter_system_calls(own_pid=os.getpid())
        try:
            reply: dict[str, typing.Any] = {"score": float(made.score_answer(answer, entry))}
        except BaseException as error:  # of the library, whatever the answer is
            reply = {"raised": told(error)}
        os.write(pipe, json.dumps(reply).encode())
    finally:
        os._exit(0)


def told(error: BaseException) -> str:
    """Returns the type and message of an exception, shortened."""
    try:
        said = str(error)
    except BaseException:
        said = ""
    return f"{type(error).__name__}: {said}"[:LARGEST_TOLD].rstrip(": ")


def main(what: str, tasks: str = "") -> None:
    # prints of the library go to the log: standard output carries replies
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(fields: dict[str, typing.Any]) -> None:
        out.write(json.dumps(fields, default=str) + "\n")
        out.flush()

    if what == "records":
        try:
            for record in created(tasks):
                say(record)
        except TasksRefused as error:
            say({"error": str(error)})
        return
    importlib.import_module("reasoning_gym")
    out.write("ready\n")
    out.flush()
    for line in sys.stdin:
        say(scored(*json.loads(line)))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main(*sys.argv[1:3])
