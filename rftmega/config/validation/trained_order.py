"""Checks of rollout.order, the recorded training order of another run."""

from pathlib import Path
from typing import Any

from rftmega.config.schema import RunConfig
from rftmega.core.json_files import NotJSON, parse_json


def trained_order(config: RunConfig) -> list[str]:
    """Returns the reason why this run cannot use the file that rollout.order names, another run's
    trained_order.jsonl, as a list of at most one.
    """
    given = config.rollout.order
    if not given:
        return []
    path, name = Path(given), f"rollout.order={given}"
    if not path.is_file():
        return [f"{name} is no file. Give trained_order.jsonl of an earlier run's trainer.output."]
    if path.resolve() == (Path(config.trainer.output) / "trained_order.jsonl").resolve():
        return [f"{name} is what this run writes itself. Give trainer.output another folder."]
    lines = [line for line in path.read_bytes().split(b"\n") if line]
    if not lines:
        return [f"{name} is empty: that run has learnt nothing. Give another's, or leave it out."]
    before: int | None = None
    for number, line in enumerate(lines, start=1):
        try:
            said = parse_json(line)
        except NotJSON as error:
            return [f"{name}:{number}: {error}. Remove the line, and those behind it."]
        if not _is_step(said):
            return [
                f"{name}:{number} has no groups of a step (step, taken, versions, dropped). Give trained_order.jsonl of an "
                "earlier run's trainer.output."
            ]
        if before is not None and said["step"] != before + 1:
            return [
                f"{name}:{number} is of step {said['step']}, behind one of step {before}: a step is missing or there twice. Give "
                "a whole record."
            ]
        before = said["step"]
        for option in ("prompts_per_step", "max_staleness"):
            own = getattr(config.trainer, option)
            if said.get(option) != own:
                return [
                    f"{name} is of a run with trainer.{option}={said.get(option)}, and this one has {own}: other groups would be "
                    "under way. Give both the same."
                ]
    return []


def _is_step(said: Any) -> bool:
    """Returns whether `said`, a parsed line of trained_order.jsonl, describes the groups of a step,
    as `trainer.trained_order` expects.
    """
    if not isinstance(said, dict) or not isinstance(said.get("step"), int):
        return False
    taken, versions, dropped = (said.get(name) for name in ("taken", "versions", "dropped"))
    if not (isinstance(taken, list) and isinstance(versions, list) and _are_whole(dropped)):
        return False
    if not taken or len(taken) != len(versions):
        return False
    return all(
        bool(numbers)
        and _are_whole(numbers)
        and isinstance(own, list)
        and len(own) == len(numbers)
        and all(map(_are_whole, own))
        for numbers, own in zip(taken, versions, strict=True)
    )


def _are_whole(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(isinstance(each, int) for each in numbers)
