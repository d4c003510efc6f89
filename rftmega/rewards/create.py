"""Builds a reward from a run's options."""

from collections import Counter
from collections.abc import Callable, Iterable

from rftmega.config import RewardConfig
from rftmega.errors import DataError
from rftmega.options.parts import IMPLEMENTATIONS
from rftmega.rewards import code, multiple_choice
from rftmega.rewards.code import CodePart
from rftmega.rewards.exact_match import exact_match_rule
from rftmega.rewards.format import format_rule
from rftmega.rewards.functions import function_part, missing_columns
from rftmega.rewards.judge import JudgePart
from rftmega.rewards.math import MathPart
from rftmega.rewards.mix import MixedReward, parts_of, unknown_kind, weights_of
from rftmega.rewards.part import Decode, Part, each
from rftmega.rewards.remote import RemotePart
from rftmega.types import Prompt
from rftmega.user_code.functions import RewardFunction, function_of, name_of

PARTS: dict[str, Callable[[RewardConfig, Decode], Part]] = {
    "code": lambda config, decode: CodePart(
        workers=config.workers,
        seconds=config.code_seconds,
        memory_mib=config.code_memory_mib,
        inside=config.code_tests_inside,
    ),
    "exact_match": lambda config, decode: each(exact_match_rule(config.answer_pattern)),
    "format": lambda config, decode: each(format_rule(config.format_pattern)),
    "math": lambda config, decode: MathPart(workers=config.workers, seconds=config.math_seconds),
    "multiple_choice": lambda config, decode: each(multiple_choice.multiple_choice),
    "remote": lambda config, decode: RemotePart(
        config.remote_url,
        decode,
        timeout=config.remote_timeout,
        retries=config.remote_retries,
        batch=config.remote_batch,
    ),
    "judge": lambda config, decode: JudgePart(config, decode),
}
LABELS: dict[str, Callable[[str], str | None]] = {  # part -> why it can't work with a label
    "code": code.complaint,
    "multiple_choice": multiple_choice.complaint,
}


def create(config: RewardConfig, decode: Decode) -> MixedReward:
    """Creates the reward of `config`, with the parts that have a weight.

    `decode` turns token ids into text.

    Raises ConfigError where reward.format_pattern or reward.answer_pattern is no regular
    expression.
    """
    used = parts_of(config)
    parts = {name: make(config, decode) for name, make in PARTS.items() if name in used}
    for name, function in functions_of(config).items():
        if name in used:
            parts[name] = function_part(function, f"reward.functions: {name}", decode)
    for name, options in config.custom.items():
        if name in used:
            function, where = IMPLEMENTATIONS[type(options)], f"reward.custom.{name}"
            parts[name] = function_part(function, where, decode, options=options)
    return MixedReward(config, parts, decode)


def functions_of(config: RewardConfig) -> dict[str, RewardFunction]:
    """Returns name -> function of reward.functions. Raises ConfigError where there is none."""
    return {name_of(reference): function_of(reference) for reference in config.functions}


def check_prompts(config: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Raises DataError for what would fail once training has begun: kinds without weights, labels
    that a part can't read, columns that a function asks for and that are not there.

    With reward.majority nothing reads either.
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
    problems = [
        f"reward.{name}: {why} (prompt {prompt.index})."
        for prompt in prompts
        for name in weights_of(config, prompt.kind)
        if name in LABELS and (why := LABELS[name](prompt.label))
    ]
    functions = functions_of(config)
    problems += [
        f"reward.functions: {name} asks for {missing}, which is no column (prompt {prompt.index})."
        for prompt in prompts
        for name in weights_of(config, prompt.kind)
        if name in functions and (missing := missing_columns(functions[name], prompt))
    ]
    if problems:
        raise DataError.first_of(problems)
