"""Checks of reward components and of rewards without labels."""

from dataclasses import fields
from urllib.parse import urlsplit

from rftmega.config.schema import DataConfig, RewardConfig, RunConfig
from rftmega.config.secrets import has_credentials, shown
from rftmega.config.user_code.functions import function_of
from rftmega.core.errors import ConfigError

REWARD_OPTIONS = {  # option -> components that read it
    "format_pattern": ("format",),
    "math_seconds": ("math",),
    "code_seconds": ("code",),
    "code_memory_mib": ("code",),
    "code_tests_inside": ("code",),
    "workers": ("math", "code", "task_library"),
    "remote_url": ("remote",),
    "remote_timeout": ("remote",),
    "remote_retries": ("remote",),
    "remote_batch": ("remote",),
    **{
        f"judge_{name}": ("judge",)
        for name in (
            *("url", "model", "key_env", "template", "pattern", "scale", "temperature"),
            *("max_tokens", "timeout", "retries", "per_second", "concurrency", "cache"),
        )
    },
}
COMPARING = {"exact_match", "math", "multiple_choice", "code"}  # a response with its label
NAMES_OF_METRICS = ("reward", "majority", "model", "cost", "accuracy")


def reward_parts(config: RunConfig) -> list[str]:
    """Returns the problems of reward options: invalid weights, missing requirements of components,
    and options without effect.
    """
    reward, parts = config.reward, config.reward.parts()
    own = {f"reward.custom.{name}.weight": part.weight for name, part in reward.custom.items()}
    flat = {f"reward.{name}": getattr(reward, name) for name in (*reward.built_in(), "model")} | own
    found: list[str] = []
    for kind, given in reward.recipe.items():
        if unknown := [name for name in given if name not in parts]:
            found.append(
                f"reward.recipe.{kind}: {', '.join(unknown)} is unknown. Choose among: {', '.join(parts)}."
            )
        elif not any(given.values()):
            found.append(
                f"reward.recipe.{kind} gives no part a weight, so nothing could be learnt from it."
            )
    weighs = (
        reward.scoring_models() or config.environment.may_reward or any(reward.weights().values())
    )
    if not reward.recipe and not weighs:
        found.append(
            "No reward has a weight, so nothing could be learnt. Set one of: "
            + ", ".join([*flat, "reward.functions"])
            + "."
        )
    if reward.recipe:
        for name in reward.built_in():
            if (weight := getattr(reward, name)) != getattr(RewardConfig, name):
                found.append(
                    f"reward.{name}={weight} beside reward.recipe: nothing reads it. Move it there."
                )
        for name, own_part in reward.custom.items():
            if own_part.weight:
                found.append(
                    f"reward.custom.{name}.weight={own_part.weight} beside reward.recipe: nothing reads it. Move it there."
                )
    if not reward.functions and reward.function_weights:
        found.append(
            f"reward.function_weights={reward.function_weights} needs reward.functions: nothing else reads it."
        )
    used = reward.used()
    for name, own_part in reward.custom.items():
        found += [
            f"reward.custom.{name}.{f.name}={value} needs a weight of that part: nothing else reads it."
            for f in fields(own_part)
            if name not in used
            and (value := getattr(own_part, f.name)) != getattr(type(own_part)(), f.name)
        ]
    for part, option, what in (
        ("format", "format_pattern", "regular expression"),
        ("remote", "remote_url", "URL"),
        ("judge", "judge_url", "URL"),
        ("judge", "judge_model", "model's name"),
    ):
        if part in used and not getattr(reward, option):
            found.append(
                f"reward.{part} has a weight, but reward.{option} is empty. Give a {what}."
            )
    for option, readers in REWARD_OPTIONS.items():
        if getattr(reward, option) != getattr(RewardConfig(), option) and not used.intersection(
            readers
        ):
            needed = " or ".join(f"reward.{name}" for name in readers)
            named = shown(f"reward.{option}", getattr(reward, option))
            found.append(f"{named} needs a weight of {needed}: nothing else reads it.")
    if (markers := reward.reasoning_markers) and not (
        len(markers) == 2 and all(map(str.strip, markers)) and markers[0] != markers[1]
    ):
        found.append(
            f"reward.reasoning_markers={markers} must be two different texts, as [<think>, </think>], or none."
        )
    if "remote" in used and reward.remote_url and not _is_address(reward.remote_url):
        found.append(
            "reward.remote_url is no address. Write http://host:port/path, or https://...; in a password, / is %2F, @ is %40."
        )
    if "judge" in used:
        found += _judge(reward)
    if reward.environment and not config.environment.may_reward:
        found.append(
            f"reward.environment={reward.environment} needs an environment that gives rewards; environment.type="
            f"{config.environment.type} gives none."
        )
    if reward.majority and config.environment.may_reward:
        found.append(
            f"reward.majority votes over whole groups of completions, and rollouts of "
            f"environment.type={config.environment.type} may be left out of one. Take environment=single_turn, or labels."
        )
    if config.data.kind_key != DataConfig.kind_key and not reward.recipe and "remote" not in used:
        found.append(
            f"data.kind_key={config.data.kind_key} needs reward.recipe or reward.remote: nothing else reads kinds."
        )
    return found + _functions(reward) + _beside_labels(config)


def _functions(reward: RewardConfig) -> list[str]:
    """Returns the problems of reward.functions: functions that do not exist, names that are taken,
    and weights that match no function.
    """
    found, names = [], reward.function_names()
    for reference in reward.functions:
        try:
            function_of(reference)
        except ConfigError as error:
            found.append(str(error))
    taken = {*reward.built_in(), *reward.custom, *NAMES_OF_METRICS}
    for name in sorted(set(names)):
        if name in taken or names.count(name) > 1:
            found.append(
                f"reward.functions: {name} is the name of another part. Rename the function."
            )
    weights = reward.function_weights
    if weights and reward.recipe:
        found.append(
            f"reward.function_weights={weights} beside reward.recipe: nothing reads it. Move them there."
        )
    elif weights and len(weights) != len(names):
        found.append(
            f"reward.function_weights={weights} must be one for each of reward.functions ({len(names)})."
        )
    return found


def _judge(reward: RewardConfig) -> list[str]:
    """Returns the problems of the judge's address and scale; its template is checked when the
    reward is created.
    """
    found, scale = [], reward.judge_scale
    if reward.judge_url and not _is_address(reward.judge_url):
        found.append("reward.judge_url is no address. Write http://host:port/v1, or https://...")
    elif has_credentials(reward.judge_url):
        found.append(
            "reward.judge_url holds a user or a password. Put a key in a variable that reward.judge_key_env names."
        )
    if len(scale) != 2 or not scale[0] < scale[1]:
        found.append(
            f"reward.judge_scale={scale} must be the worst and the best number, as [0, 10]."
        )
    return found


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        return False


def _reads_labels(config: RunConfig) -> bool:
    """Returns whether evaluation compares responses with labels."""
    judging = COMPARING & config.reward.used()
    return bool(judging) or config.trainer.eval_accuracy not in config.reward.function_names()


def _beside_labels(config: RunConfig) -> list[str]:
    """Returns the problems of rewards that use no labels, and of options that compare the rewards
    of a group.
    """
    reward, found = config.reward, []
    sampled = config.algorithm.dynamic_sampling
    found += [
        f"reward.{name}={weight} and reward.{name}_path={path!r} need each other: a weight, and the folder of a {what} model."
        for name, what, weight, path in (
            ("model", "reward", reward.model, reward.model_path),
            ("cost", "cost", reward.cost, reward.cost_path),
        )
        if bool(weight) != bool(path)
    ]
    if reward.model and reward.majority:
        found.append(
            "reward.majority and reward.model are two ways to do without labels. Take one of them."
        )
    if reward.majority and not config.data.held_out:
        found += [
            f"reward.{name}={weight} beside reward.majority: without evaluation (data.eval) nothing reads it. Leave it out."
            for name in (*reward.built_in(), "recipe", "functions")
            if (weight := getattr(reward, name)) != getattr(RewardConfig(), name)
        ]
    if reward.majority and config.rollout.samples_per_prompt < 3:
        found.append(
            f"reward.majority needs more completions a prompt than "
            f"rollout.samples_per_prompt={config.rollout.samples_per_prompt}: two can't outvote each other."
        )
    needing = sorted(COMPARING & reward.used())
    if not config.data.label_key and needing and not reward.majority:
        found.append(
            f"data.label_key is empty, but {', '.join(f'reward.{name}' for name in needing)} compares answers with labels. Set "
            "its weight to 0 (reward.majority, reward.model, format, remote and functions need none)."
        )
    if not config.data.label_key and config.data.held_out and _reads_labels(config):
        found.append(
            "data.label_key is empty, but evaluation compares answers with labels. Name the key, or leave data.eval out."
        )
    if (
        config.algorithm.dynamic_sampling.max_rounds
        and (config.rollout.train_samples_per_prompt or config.rollout.samples_per_prompt) < 2
    ):
        found.append(
            f"algorithm.dynamic_sampling.max_rounds={sampled.max_rounds} compares a prompt's completions, and there is one of "
            "each. Raise rollout.samples_per_prompt (and rollout.train_samples_per_prompt), or set it to 0."
        )
    if sampled.max_rounds:
        found += [
            f"algorithm.dynamic_sampling.max_rounds={sampled.max_rounds} with {model.option.removesuffix('_path')}: the engine "
            f"gives its memory to the {name.replace('_', ' ')} and could not go on. Set it to 0."
            for name, model in reward.scoring_models().items()
        ]
    scored = reward.in_every_completion() - (set() if config.data.label_key else {"exact_match"})
    everywhere = ["majority"] if reward.majority else sorted(scored)
    if sampled.metric and sampled.metric not in everywhere:
        found.append(
            f"algorithm.dynamic_sampling.metric={sampled.metric} is not in every completion's reward. Choose one of: "
            f"{', '.join(everywhere)}."
        )
    return found
