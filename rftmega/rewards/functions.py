"""User-defined reward functions with TRL's signature."""

import asyncio
import difflib
import inspect
import json
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rftmega.config.user_code.functions import RewardFunction
from rftmega.core.errors import RewardError
from rftmega.core.types import Prompt
from rftmega.rewards.part import Answer, Decode, Part

OURS = ("prompts", "completions", "completion_ids", "trajectories")  # keywords other than columns
NEVER_COLUMNS = ("prompt", "completion", *OURS)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def function_part(
    function: RewardFunction, where: str, decode: Decode, *, options: Any = None
) -> Part:
    """Returns a reward component that calls `function` with keyword arguments, one list each:
    prompts, completions, completion_ids, trajectories (a tuple of types.Trajectory per rollout),
    and the columns of the data set; also `options` if given.

    Prompts and completions are text, or lists of chat messages if the data has messages. A column
    that a record lacks has None for this record. A function without **keywords gets only the
    arguments that it names. Calls are serialised unless the function is an `async def`. The
    component raises RewardError, whose message begins with `where`, if the function raises an error
    or does not return scores.
    """
    taken, _ = _parameters(function)
    one_at_a_time = threading.Lock()

    def part(answers: Sequence[Answer]) -> list[float | None]:
        keywords = _keywords(answers, decode) | ({} if options is None else {"options": options})
        if taken is not None:
            keywords = {name: value for name, value in keywords.items() if name in taken}
        try:
            if _is_async(function):
                given = asyncio.run(function(**keywords))
            else:
                with one_at_a_time:
                    given = function(**keywords)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit, too: the run is not the function's to end
            told = f"{where} raised {_told(error, function)}"
            if isinstance(error, KeyError) and error.args and error.args[0] not in keywords:
                told += f". {lacking([str(error.args[0])], keywords)}"
            raise RewardError(told) from error
        return _scores(given, len(answers), where)

    return part


def missing_columns(function: RewardFunction, prompt: Prompt) -> set[str]:
    """Returns the names of the required arguments of `function` for which the prompt's record has
    no column.
    """
    _, needed = _parameters(function)
    return needed - {*OURS, *_columns(prompt.record, prompt.label)}


def lacking(names: Iterable[str], columns: Iterable[str]) -> str:
    """Returns the end of an error message about columns `names` that records lack: the nearest
    names, and all `columns` that there are.
    """
    known = sorted(set(columns) - {*OURS, "options"})
    near = [near for name in names for near in difflib.get_close_matches(name, known, n=1)]
    hint = f" Did you mean {' and '.join(near)}?" if near else ""
    return f"The columns are: {', '.join(known) or 'none'}.{hint} data.columns gives a column another name."


def columns_of(prompt: Prompt) -> list[str]:
    """Returns the names of the columns that reward functions get of a prompt's record."""
    return list(_columns(prompt.record, prompt.label))


def _parameters(function: RewardFunction) -> tuple[set[str] | None, set[str]]:
    """Returns (accepted, required): the keywords that a function accepts (None: any keyword), and
    those that it requires.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return None, set()
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    named = [each for each in parameters if each.kind in NAMED]
    needed = {each.name for each in named if each.default is inspect.Parameter.empty}
    return None if takes_any else {each.name for each in named}, needed


def _is_async(function: RewardFunction) -> bool:
    call = getattr(function, "func", function)  # of functools.partial
    own = getattr(call, "__call__", call)  # noqa: B004  an object's
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(own)


def _keywords(answers: Sequence[Answer], decode: Decode) -> dict[str, list[Any]]:
    records = [_columns(answer.record, answer.label) for answer in answers]
    prompts = [_prompt(answer, decode) for answer in answers]
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    return columns | {
        "prompts": prompts,
        "completions": [
            _completion(answer, prompt) for answer, prompt in zip(answers, prompts, strict=True)
        ],
        "completion_ids": [list(answer.completion_ids) for answer in answers],
        "trajectories": [answer.trajectories for answer in answers],
    }


def _columns(record: str, label: str) -> dict[str, Any]:
    """Returns name -> value of the columns of a dataset record, given as JSON in `record`; only
    {"label": label} if `record` is empty.
    """
    if not record:
        return {"label": label}
    return {name: value for name, value in json.loads(record).items() if name not in NEVER_COLUMNS}


def _prompt(answer: Answer, decode: Decode) -> Any:
    """Returns a response's prompt as in the data set, text or messages; without a record of the
    data set, the decoded prompt tokens.
    """
    return json.loads(answer.record)["prompt"] if answer.record else decode(answer.prompt_ids)


def _completion(answer: Answer, prompt: Any) -> Any:
    if isinstance(prompt, str):
        return answer.response
    return [{"role": "assistant", "content": answer.response}]


def _scores(given: Any, count: int, where: str) -> list[float | None]:
    """Converts `given`, the result of a reward function, to a list of scores.

    Raises RewardError, whose message begins with `where`, unless the result consists of `count`
    entries that are numbers or None.
    """
    scores = given.tolist() if hasattr(given, "tolist") else given  # of NumPy or torch
    if not isinstance(scores, Iterable) or isinstance(scores, str | bytes | Mapping):
        raise RewardError(
            f"{where} gave {type(given).__name__} for {count} completion(s): return a list of as many numbers."
        )
    scores = list(scores)
    if len(scores) != count:
        raise RewardError(
            f"{where} gave {len(scores)} score(s) for {count} completion(s): return one for each, in their order."
        )
    for score in scores:
        if score is not None and not hasattr(type(score), "__float__"):
            raise RewardError(
                f"{where} gave {score!r} as a score: return a number, or None where it does not apply."
            )
    return [None if score is None else float(score) for score in scores]


def _told(error: BaseException, function: RewardFunction) -> str:
    """Returns the message of `error`, which the user's `function` raised, with the file and line
    that raised it.
    """
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    last = (own or list(frames))[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
