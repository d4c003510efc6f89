"""Checks of fault tolerance options."""

from rftmega.config.schema import FaultsConfig, RolloutConfig, RunConfig

TAKEN = (1, 2, 86)  # a fault, a configuration error, the watchdog: see docs/fault_tolerance.md


def faults(config: RunConfig) -> list[str]:
    """Returns the problems of fault tolerance options: options without effect, an exit code that is
    already in use, and deadlines longer than the watchdog's.
    """
    chosen, found = config.faults, []
    repeats = chosen.rollout_repeats
    if repeats != FaultsConfig.rollout_repeats and not config.environment.may_reward:
        found.append(
            f"faults.rollout_repeats={repeats} needs an environment that depends on something else than the model; "
            f"environment.type={config.environment.type} does not."
        )
    if not config.checkpoint.every:
        found += [
            f"faults.{name}={value} needs checkpoint.every above 0: there would be nothing to go on from."
            for name in ("max_restarts", "requeue_code")
            if (value := getattr(chosen, name)) != getattr(FaultsConfig, name)
        ]
    if not 1 < chosen.requeue_code < 126 or chosen.requeue_code in TAKEN:
        found.append(
            f"faults.requeue_code={chosen.requeue_code} must be between 3 and 125, and not 86: others have a meaning already."
        )
    deadline = config.rollout.deadline_seconds
    if (
        config.strategy == "separate"
        and deadline >= chosen.watchdog_seconds > 0
        and deadline != RolloutConfig.deadline_seconds
    ):
        found.append(
            f"rollout.deadline_seconds={deadline:g} must be below faults.watchdog_seconds={chosen.watchdog_seconds:g}, "
            "which would end the run first."
        )
    return found
