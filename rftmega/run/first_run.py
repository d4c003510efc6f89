"""Generates the YAML file of a first run: GRPO on a given model, in the quickest layout
that fits.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from rftmega.config import DataConfig, ModelConfig, RunConfig
from rftmega.config.tree import value_of
from rftmega.core.errors import ConfigError
from rftmega.run.option_reference import documented
from rftmega.run.planning.backends import Best, on_backend, recommended
from rftmega.run.planning.fit import Machine
from rftmega.run.planning.models import POLICY, models_of

WIDTH = 100  # columns of a comment
ROWS = 1024  # completions per step; more if there are more devices
GROUP = 8  # completions per prompt
FOLLOWING = ("reward.exact_match",)  # options that follow from others
SHOWN = (  # options that are written although they have their defaults
    *("parallel.tensor", "rollout.tensor", "rollout.memory_fraction", "rollout.temperature"),
    *("optimizer.learning_rate", "trainer.max_tokens_per_micro_batch"),
)


def first_run(
    model: str, machine: Machine, *, prompt_tokens: int, response_tokens: int, **data: Any
) -> tuple[RunConfig, Best]:
    """Returns a GRPO config for the model folder `model` on `machine`, and the layout that the
    search has chosen.

    `prompt_tokens`, `response_tokens`: maximum lengths; `data`: values of data.* options. Raises
    ConfigError if no layout fits, or if the model has fewer positions than both lengths together.
    """
    config = RunConfig(model=ModelConfig(path=model), data=DataConfig(**data))
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = (
        prompt_tokens,
        response_tokens,
    )
    config.reward.math, config.reward.exact_match = 1.0, 0.0
    config.rollout.samples_per_prompt = GROUP
    config.trainer.prompts_per_step = max(ROWS, machine.devices) // GROUP
    config.trainer.max_tokens_per_micro_batch = max(16_384, config.rollout.max_row_tokens)
    config.trainer.steps, config.checkpoint.every = 200, 20
    config.optimizer.warmup_steps = 10
    config.parallel.sequence = False
    described = models_of(on_backend(config, "fsdp"))[POLICY].model
    if described.max_positions < config.rollout.max_row_tokens:
        raise ConfigError(
            f"{model} knows {described.max_positions} positions, fewer than the {config.rollout.max_row_tokens} tokens of a "
            "prompt and its completion. Lower --response-tokens or --prompt-tokens."
        )
    found = recommended(config, machine)
    if not found.backend:
        raise ConfigError(
            f"No layout of {model} fits {machine.devices} devices of {machine.budget.memory / 1e9:g} GB: {found.why}. Take "
            "more devices, larger ones, or fewer tokens (--response-tokens)."
        )
    best = next(best for name, best in found.best.items() if name == found.backend)
    assert best.config is not None
    return best.config, best


def as_yaml(config: RunConfig, heading: str) -> str:
    """Returns a run's options as YAML, each with its description: those that differ from their
    defaults, and those that users change first. `heading`: text of the comment at the top.
    """
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    plain = RunConfig()
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name == "critic":
            continue
        if not is_dataclass(value):
            if value != getattr(plain, each.name) or each.name == "backend":
                lines += ["", *_option(config, each.name, 0)]
            continue
        own = list(_differing(config, plain, each.name))
        if own:
            lines += ["", f"{each.name}:"]
            for name in own:
                lines += _option(config, name, 2)
    return "\n".join([*lines, ""])


def _differing(config: RunConfig, plain: RunConfig, section: str) -> Iterator[str]:
    for each in fields(value_of(config, section)):
        name = f"{section}.{each.name}"
        value = value_of(config, name)
        known = not is_dataclass(value) and name not in FOLLOWING
        if known and (name in SHOWN or value != value_of(plain, name)):
            yield name


def _option(config: RunConfig, name: str, indent: int) -> list[str]:
    *section, leaf = name.split(".")
    owner: Any = value_of(config, section[0]) if section else config
    meaning = " ".join(documented(owner.__class__)[leaf][1].partition("\n\n")[0].split())
    said = textwrap.wrap(
        meaning, WIDTH, initial_indent=" " * indent + "# ", subsequent_indent=" " * indent + "# "
    )
    value = yaml.safe_dump(value_of(config, name), default_flow_style=True, width=1000)
    return [*said, f"{' ' * indent}{leaf}: {value.removesuffix('...' + chr(10)).strip()}"]
