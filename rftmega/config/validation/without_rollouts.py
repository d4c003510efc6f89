"""Checks for options that tasks without rollouts (algorithm.task=sft, reward_model and preference)
do not read.
"""

from dataclasses import fields, is_dataclass
from typing import Any

from rftmega.config.schema import FaultsConfig, RunConfig, TrainerConfig
from rftmega.config.secrets import shown
from rftmega.config.tree import options

LENGTHS = ("rollout.max_prompt_tokens", "rollout.max_response_tokens")
OF_EVERY_TASK = tuple(
    f"algorithm.{name}" for name in ("task", "recipe", "updates_per_epoch", "epochs_per_rollout")
)
OF_ROLLOUTS = (
    "offload",
    "trajectories",
    "eval_samples",
    "eval_temperature",
    "eval_top_p",
    "eval_top_k",
    "eval_min_p",
    "eval_pass_at",
    "eval_accuracy",
    "eval_shown",
    "trajectories_mib",
)
OF_PREFERENCES = tuple(name for name in options() if name.startswith("algorithm.preference."))
READ_OF_GIVEN = {  # options of algorithm and rollout that a task without rollouts reads
    "sft": (
        *(*OF_EVERY_TASK, "algorithm.loss_aggregation", "algorithm.ema_beta", *LENGTHS),
        *("rollout.max_images", "rollout.max_videos"),
    ),
    "reward_model": (*OF_EVERY_TASK, "algorithm.reward_model_loss", *LENGTHS),
    "preference": (
        *(*OF_EVERY_TASK, *OF_PREFERENCES, "algorithm.ema_beta", *LENGTHS),
        *("rollout.max_images", "rollout.max_videos"),
    ),
}


def unread_without_rollouts(config: RunConfig) -> list[str]:
    """Returns a problem for each option that is set although a task without rollouts does not read
    it.
    """
    task = config.algorithm.task
    read = READ_OF_GIVEN[task]
    before, now = leaves(RunConfig()), leaves(config)
    settings = [
        (name, value, before.get(name))
        for name, value in now.items()
        if name.startswith(("algorithm.", "rollout.", "reward.", "environment."))
    ]
    trainer = [
        (f"trainer.{name}", getattr(config.trainer, name), getattr(TrainerConfig(), name))
        for name in OF_ROLLOUTS
        # `held_out_prompts` has rejected these already
        if config.data.held_out or not name.startswith("eval_")
    ]
    whole = [
        ("strategy", config.strategy, RunConfig.strategy),
        ("faults.engine_restarts", config.faults.engine_restarts, FaultsConfig.engine_restarts),
        ("faults.rollout_repeats", config.faults.rollout_repeats, FaultsConfig.rollout_repeats),
    ]
    return [
        f"{shown(name, value)}: with algorithm.task={task} nothing is generated or rewarded, so nothing reads it. Leave it out."
        for name, value, default in whole + settings + trainer
        if name not in read and value != default
    ]


def leaves(config: RunConfig) -> dict[str, Any]:
    """Returns dotted name -> value of all options; dictionaries are not split into their entries."""
    found: dict[str, Any] = {}

    def collect(part: Any, prefix: str) -> None:
        for f in fields(part):
            value = getattr(part, f.name)
            if is_dataclass(value):
                collect(value, f"{prefix}{f.name}.")
            else:
                found[prefix + f.name] = value

    collect(config, "")
    return found
