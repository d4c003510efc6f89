"""Builds the reward of a run from its options."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rftmega.config import RewardConfig
from rftmega.config.options.parts import IMPLEMENTATIONS
from rftmega.config.user_code.functions import RewardFunction, function_of, name_of
from rftmega.core.errors import DataError
from rftmega.core.types import Prompt
from rftmega.rewards import code_labels, multiple_choice
from rftmega.rewards.answer import answer_of
from rftmega.rewards.code import CodePart, code_of
from rftmega.rewards.exact_match import exact_match_rule
from rftmega.rewards.format import format_rule
from rftmega.rewards.functions import columns_of, function_part, lacking, missing_columns
from rftmega.rewards.judge import JudgePart
from rftmega.rewards.math import MathPart
from rftmega.rewards.math import complaints as math_complaints
from rftmega.rewards.mix import MixedReward, parts_of, unknown_kind, weights_of
from rftmega.rewards.part import Decode, Part, each
from rftmega.rewards.reasoning import Reasoning
from rftmega.rewards.remote import RemotePart
from rftmega.rewards.task_library import TaskLibraryPart, is_of_library

PARTS: dict[str, Callable[[RewardConfig, Decode], Part]] = {
    "code": lambda config, decode: CodePart(
        workers=config.workers,
        seconds=config.code_seconds,
        memory_mib=config.code_memory_mib,
        inside=config.code_tests_inside,
    ),
    "exact_match": lambda config, decode: each(
        exact_match_rule(
            config.answer_pattern,
            ignore_case=config.exact_match_ignore_case,
            numeric=config.exact_match_numeric,
        )
    ),
    "format": lambda config, decode: each(format_rule(config.format_pattern)),
    "math": lambda config, decode: MathPart(workers=config.workers, seconds=config.math_seconds),
    "multiple_choice": lambda config, decode: each(multiple_choice.multiple_choice),
    "task_library": lambda config, decode: TaskLibraryPart(
        answer_of(config.answer_pattern), workers=config.workers
    ),
    "remote": lambda config, decode: RemotePart(
        config.remote_url,
        decode,
        timeout=config.remote_timeout,
        retries=config.remote_retries,
        batch=config.remote_batch,
    ),
    "judge": lambda config, decode: JudgePart(config, decode),
}
# component -> function that returns the function which reads an answer in a response
EXTRACTORS: dict[str, Callable[[RewardConfig, Any], Callable[[str], str | None]]] = {
    "code": lambda config, part: code_of,
    "exact_match": lambda config, part: answer_of(config.answer_pattern),
    "math": lambda config, part: part.answer_in,
    "multiple_choice": lambda config, part: multiple_choice.chosen_letter,
    "task_library": lambda config, part: part.answer_in,
}
# component -> function that returns label -> complaint for invalid labels
LABELS: dict[str, Callable[[RewardConfig, Iterable[str]], dict[str, str]]] = {
    "code": lambda config, labels: told(code_labels.complaint, labels),
    "math": lambda config, labels: math_complaints(labels, workers=config.workers),
    "multiple_choice": lambda config, labels: told(multiple_choice.complaint, labels),
}


def create(config: RewardConfig, decode: Decode, reasoning: Reasoning | None = None) -> MixedReward:
    """Returns the reward of `config`, with all components that have a weight other than 0 for some
    prompts.

    `decode` converts token ids to text. `reasoning` removes reasoning before grading; None: removes
    <think> blocks. Raises ConfigError if reward.format_pattern or reward.answer_pattern is not a
    regular expression, or reward.answer_pattern searches for reasoning markers.
    """
    reasoning = reasoning or Reasoning.plain(decode)
    reasoning.refuse(config.answer_pattern, "reward.answer_pattern")
    used = parts_of(config)
    parts = {name: make(config, decode) for name, make in PARTS.items() if name in used}
    for name, function in functions_of(config).items():
        if name in used:
            parts[name] = function_part(function, f"reward.functions: {name}", decode)
    for name, options in config.custom.items():
        if name in used:
            function, where = IMPLEMENTATIONS[type(options)], f"reward.custom.{name}"
            parts[name] = function_part(function, where, decode, options=options)
    extractors = {
        name: make(config, parts[name]) for name, make in EXTRACTORS.items() if name in parts
    }
    return MixedReward(config, parts, decode, reasoning, extractors)


def functions_of(config: RewardConfig) -> dict[str, RewardFunction]:
    """Returns name -> function for the entries of reward.functions. Raises ConfigError if a
    function cannot be found.
    """
    return {name_of(reference): function_of(reference) for reference in config.functions}


def check_prompts(config: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Raises DataError if a prompt could not be scored during training: its task type has no
    weights, a component cannot read its label, or its record lacks a column that a reward function
    needs.

    With reward.majority nothing is checked.
    """
    prompts = [] if config.majority else list(prompts)
    unknown = Counter(
        prompt.kind for prompt in prompts if config.recipe and prompt.kind not in config.recipe
    )
    if unknown:
        raise DataError(
            "\n".join(
                f"{unknown_kind(config, kind)} ({n} prompt(s))."
                for kind, n in sorted(unknown.items())
            )
        )
    problems = _unreadable(config, prompts) + _without_scorer(config, prompts)
    problems += _without_columns(config, prompts)
    if problems:
        raise DataError.first_of(problems)


def _without_scorer(config: RewardConfig, prompts: Sequence[Prompt]) -> list[str]:
    """Returns one message per prompt that only its library could score, but that is of no library."""
    return [
        f"reward.task_library: this prompt is of no task library, so nothing would score it (prompt {prompt.index}). Give "
        "weights by task type: reward.recipe={reasoning_gym: {task_library: 1}, '': {exact_match: 1}}."
        for prompt in prompts
        if weights_of(config, prompt.kind).keys() == {"task_library"} and not is_of_library(prompt)
    ]


def _without_columns(config: RewardConfig, prompts: Sequence[Prompt]) -> list[str]:
    """Returns one message per function and set of columns that it needs and records lack."""
    functions = {
        **{name: ("functions: ", each) for name, each in functions_of(config).items()},
        **{name: ("custom.", IMPLEMENTATIONS[type(each)]) for name, each in config.custom.items()},
    }
    found: dict[tuple[str, ...], list[Prompt]] = {}
    for prompt in prompts:
        for name in weights_of(config, prompt.kind):
            if name not in functions:
                continue
            where, function = functions[name]
            missing = missing_columns(function, prompt) - (
                {"options"} if name in config.custom else set()
            )
            if missing:
                found.setdefault((f"reward.{where}{name}", *sorted(missing)), []).append(prompt)
    return [
        f"{where} asks for {', '.join(missing)}, which is no column of {len(own)} of {len(prompts)} records (the first is prompt "
        f"{own[0].index}). {lacking(missing, columns_of(own[0]))}"
        for (where, *missing), own in found.items()
    ]


def told(complaint: Callable[[str], str | None], labels: Iterable[str]) -> dict[str, str]:
    """Returns label -> error message for the invalid labels. `complaint` returns the error message
    for a label, or None if the label is valid.
    """
    return {label: why for label in labels if (why := complaint(label))}


def _unreadable(config: RewardConfig, prompts: Sequence[Prompt]) -> list[str]:
    """Returns one message per prompt and component that scores the prompt but cannot read its
    label.
    """
    scored = {prompt.kind: weights_of(config, prompt.kind).keys() for prompt in prompts}
    found = {}
    for name, complaints in LABELS.items():
        if labels := {each.label: None for each in prompts if name in scored[each.kind]}:
            found[name] = complaints(config, labels)
    return [
        f"reward.{name}: {found[name][prompt.label]} (prompt {prompt.index})."
        for prompt in prompts
        for name in found
        if name in scored[prompt.kind] and prompt.label in found[name]
    ]
