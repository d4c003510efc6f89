"""Splits devices between a trainer and separate servers, and computes a lower bound of the step
time for each rollout schedule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rftmega.config import RunConfig
from rftmega.run.planning.data_plane import COMPLETIONS, tokens_of
from rftmega.run.planning.fit import Machine, changed, misfits, push_bound, refused
from rftmega.run.planning.memory import cache_of
from rftmega.run.planning.models import POLICY, PlannedModel
from rftmega.run.planning.times import generated, seconds

SYNCHRONOUS, AHEAD = "synchronous", "one ahead"
BOUNDS = (1, 2, 4)  # of trainer.max_staleness, besides the config's own


@dataclass(frozen=True)
class DeviceSplit:
    """DeviceSplit is a number of devices for the trainer and a number of servers on the others,
    with lower bounds of the step time.
    """

    trainers: int
    servers: int
    rollout: float  # seconds of a step's completions, not overlapped
    learning: float  # seconds of the trainer's share of a step
    steps: Mapping[str, float]  # schedule -> lower bound of seconds per step


def splits_of(
    models: Mapping[str, PlannedModel], config: RunConfig, machine: Machine, *, mean_length: float
) -> tuple[list[DeviceSplit], list[str]]:
    """Returns the splits of all devices that fit, and the distinct reasons why other splits do not.

    Layout and rollout.tensor stay as configured; the data-parallel size and the number of servers
    vary. `mean_length`: mean completion length as a share of the maximum.
    """
    ranks = config.rollout.tensor
    found: list[DeviceSplit] = []
    reasons: dict[str, None] = {}
    for servers in range(1, (machine.devices - 1) // ranks + 1):
        candidate = changed(config, {"rollout.servers": servers})
        problems = refused(models, candidate, machine)
        if not problems:
            over = misfits(models, candidate, machine, push_bound(models[POLICY], candidate))
            problems = [reason.reason for reason in over]
        if problems:
            reasons |= dict.fromkeys(problems)
            continue
        found.append(_split(models, candidate, machine, mean_length))
    return found, list(reasons)


def bounds_of(config: RunConfig) -> list[int]:
    """Returns the values of trainer.max_staleness to compare, in ascending order."""
    return sorted({*BOUNDS, config.trainer.max_staleness} - {0})


def chosen_schedule(config: RunConfig) -> str:
    """Returns the name of the config's rollout schedule: SYNCHRONOUS, AHEAD or a `bound_name`."""
    if config.rollout.ahead:
        return AHEAD
    most = config.trainer.max_staleness
    return bound_name(most) if most else SYNCHRONOUS


def bound_name(most: int) -> str:
    return f"staleness {most}"


def best_of(splits: Sequence[DeviceSplit], schedule: str) -> DeviceSplit:
    """Returns the split with the shortest step under the rollout schedule named `schedule` (see
    `chosen_schedule`); among equally short ones, the split with the shortest synchronous step.
    """
    return min(splits, key=lambda split: (split.steps[schedule], split.steps[SYNCHRONOUS]))


def bytes_under_way(config: RunConfig, most: int) -> int:
    """Returns the host bytes of the completions in flight beyond those of one step, if
    trainer.max_staleness is `most` and all are finished and of maximum length.
    """
    return most * tokens_of(config) * COMPLETIONS


def _split(
    models: Mapping[str, PlannedModel], config: RunConfig, machine: Machine, mean_length: float
) -> DeviceSplit:
    policy, trainers, servers = models[POLICY], machine.trainers(config), config.rollout.servers
    cache = cache_of(policy, config, machine.budget)
    phases = seconds(models, config, trainers, None, None, machine.speeds)
    learning = sum(sum(parts.values()) for parts in phases.values())
    prompts = config.trainer.prompts_per_step / servers

    def rolled(under_way: int) -> tuple[float, float]:
        """Returns the seconds that a server is busy with its share of a step's completions, and the
        seconds of the longest completion, while `under_way` steps are in flight.
        """
        each = generated(
            policy,
            config,
            prompts,
            cache,
            machine.speeds,
            under_way=under_way,
            mean_length=mean_length,
        )
        return sum(each.busy.values()), each.longest

    rollout = max(rolled(1))
    steps = {SYNCHRONOUS: rollout + learning, AHEAD: max(rollout, learning)}
    for most in bounds_of(config):
        busy, longest = rolled(most + 1)
        # A completion started with a step's batch must end within most + 1 steps, or it is dropped.
        steps[bound_name(most)] = max(learning, busy, longest / (most + 1))
    return DeviceSplit(trainers, servers, rollout, learning, steps)
