"""Compares how the devices of a run can be divided between trainer and servers (rftmega plan --splits)."""

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rftmega.config import RunConfig
from rftmega.config.capabilities import backend_of
from rftmega.core.errors import ConfigError

if TYPE_CHECKING:
    from rftmega.run.planning.fit import Machine
    from rftmega.run.planning.models import PlannedModel
    from rftmega.run.planning.splits import DeviceSplit

GB = 1e9
WIDTH = 100  # columns
SHOWN = 4  # number of reasons shown why splits fail


def show_splits(
    models: Mapping[str, "PlannedModel"],
    config: RunConfig,
    machine: "Machine",
    *,
    mean_length: float,
    as_json: bool,
) -> int:
    """Prints each split of the devices between trainer and servers that fits into memory, with the
    times of its steps, and recommends the quickest split. Returns the exit code 0.

    `models`: the run's models by name; `mean_length`: mean completion length as a share of the
    maximum; `as_json`: whether to print JSON instead of a table. Raises ConfigError if no split
    fits.
    """
    from rftmega.run.planning.splits import best_of, bounds_of, bytes_under_way, chosen_schedule
    from rftmega.run.planning.splits import splits_of as found_splits

    if config.strategy != "separate" or config.algorithm.task != "rl":
        raise ConfigError(
            f"--splits is of a run with strategy=separate, not {config.strategy} with algorithm.task={config.algorithm.task}: "
            "there, nothing is split. Set strategy=separate, or leave --splits out."
        )
    if not 0 < mean_length <= 1:
        raise ConfigError(
            f"--mean-length={mean_length:g} is a share of rollout.max_response_tokens: give more than 0, and 1 at most."
        )
    splits, reasons = found_splits(models, config, machine, mean_length=mean_length)
    if not splits:
        raise ConfigError(_none(config, machine.devices, reasons))
    schedule = chosen_schedule(config)
    best = {name: best_of(splits, name) for name in splits[0].steps}
    if as_json:
        found: dict[str, Any] = {
            "splits": [asdict(split) for split in splits],
            "recommended": {name: asdict(split) for name, split in best.items()},
            "schedule": schedule,
            "mean_length": mean_length,
            "bytes_under_way": {most: bytes_under_way(config, most) for most in bounds_of(config)},
        }
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    said = [
        *_table(config, splits, best[schedule]),
        "",
        *_advice(config, best, schedule),
        "",
        *_price(config, machine, mean_length),
    ]
    sys.stdout.write("\n".join([*said, ""]))
    return 0


def _none(config: RunConfig, devices: int, reasons: Sequence[str]) -> str:
    parallel, ranks = config.parallel, config.rollout.tensor
    if devices <= ranks:
        return (
            f"--gpus {devices} can't be split: one server takes rollout.tensor={ranks} of them, which leaves the trainer none. "
            f"Give {ranks + 1} or more."
        )
    model = parallel.tensor * parallel.pipeline * parallel.context
    whole = "\n".join(f"  - {reason}" for reason in reasons[:SHOWN])
    return (
        f"No split of --gpus {devices} fits: servers take a multiple of rollout.tensor={ranks}, and the trainer what is left, a "
        f"multiple of parallel.tensor x pipeline x context = {model}. Change these, or --gpus. Splits fail for:\n{whole}"
    )


def _table(config: RunConfig, splits: Sequence["DeviceSplit"], best: "DeviceSplit") -> list[str]:
    """Returns a line per split with lower bounds of the step time; a star marks the recommended
    split `best`.
    """
    names = [name.replace("synchronous", "sync").replace("staleness ", "k=") for name in best.steps]
    heads = ["rollout", "update", *(name.removeprefix("one ") for name in names)]
    said = [_row("", "seconds at least of", "servers", heads)]
    for split in splits:
        cells = [_s(value) for value in (split.rollout, split.learning, *split.steps.values())]
        servers = f"{split.servers} x {config.rollout.tensor}"
        mark = "*" if split is best else ""
        said.append(_row(mark, _trainer(config, split.trainers), servers, cells))
    return said


def _trainer(config: RunConfig, trainers: int) -> str:
    from rftmega.runtime.parallel.layout import layout_name

    if not backend_of(config).layouts:
        return f"{trainers}: FSDP"
    parallel = config.parallel
    data = trainers // (parallel.tensor * parallel.pipeline * parallel.context)
    return f"{trainers}: {layout_name(parallel, data)}"


def _advice(config: RunConfig, best: Mapping[str, "DeviceSplit"], schedule: str) -> list[str]:
    mine = best[schedule]
    said = textwrap.wrap(
        f"Recommended for {schedule} steps: rollout.servers={mine.servers}, {mine.trainers} devices for the trainer: a step at "
        f"least {_s(mine.steps[schedule])} s.",
        WIDTH,
    )
    others = [
        f"{name} {split.servers} ({_s(split.steps[name])} s)"
        for name, split in best.items()
        if name != schedule
    ]
    return said + textwrap.wrap(f"Servers for the others: {', '.join(others)}.", WIDTH)


def _price(config: RunConfig, machine: "Machine", mean_length: float) -> list[str]:
    """Returns lines about the cost of a staleness bound and the assumptions of the comparison.
    `mean_length`: mean completion length as a share of the maximum.
    """
    from rftmega.run.planning.splits import bounds_of, bytes_under_way

    batch, most = config.trainer.prompts_per_step, bounds_of(config)[-1]
    memory = ", ".join(
        f"{bytes_under_way(config, each) / GB:.1f} for {each}" for each in bounds_of(config)
    )
    said = textwrap.wrap(
        f"Staleness k: a token is at most k versions behind when it is learnt, and what would be more is dropped. (k + 1) x "
        f"{batch} groups are under way, up to {batch * (most + 1)} for {most}; their tokens take at most so many GB more of the "
        f"host: {memory}. docs/asynchronous.md has the mean staleness and the groups dropped on a clock.",
        WIDTH,
    )
    said += textwrap.wrap(
        f"Assumed, not measured: answers have {mean_length:g} of rollout.max_response_tokens in the mean (--mean-length), the "
        "longest all of them, rooflines are reached, nothing is dropped. Pushes are not counted.",
        WIDTH,
    )
    if machine.devices > machine.speeds.node:
        said += textwrap.wrap(
            f"strategy=separate needs all processes of the trainer on one host, and these are {machine.devices} devices of hosts "
            f"with {machine.speeds.node} (--gpus-per-node). Servers may be on others (docs/remote_engines.md).",
            WIDTH,
            break_on_hyphens=False,
        )
    return said


def _row(mark: str, trainer: str, servers: str, cells: Sequence[str]) -> str:
    return f"{mark:<2}{trainer:<28}{servers:<9}" + "".join(f"{cell:>8}" for cell in cells)


def _s(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"
