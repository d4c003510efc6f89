"""An asynchronous run's order is written down, and another run learns the same groups in it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.core.errors import ConfigError
from rftmega.core.types import Prompt
from rftmega.monitoring.observers.trained_order import TrainedOrder
from rftmega.trainer import DynamicSampler
from rftmega.trainer.journal import Journal
from rftmega.trainer.rollout_schedules import Replayed, Synchronous
from rftmega.trainer.trained_order import read_order
from tests.unit.trainer.test_rollout_schedules import (
    BATCH,
    Made,
    Streams,
    asynchronous,
    delayed,
    made,
    saved,
)

STEPS, MOST = 14, 2
DIFFERS = "order_version_differs"


def scrambled(number: int) -> int:
    """Groups end in an order that has nothing to do with that of `delayed`."""
    return number * 7 % 5


def replayed(path: Path) -> Callable[[Any, Journal | None], Synchronous]:
    return lambda stream, journal: Replayed(
        stream, journal, max_staleness=MOST, order=read_order(path)
    )


def written(run: Made, path: Path) -> Made:
    run.trainer.callbacks = [
        *run.trainer.callbacks,
        TrainedOrder(path, prompts_per_step=BATCH, max_staleness=MOST),
    ]
    return run


def without_times(run: Made) -> list[dict[str, float]]:
    own = ("seconds_", DIFFERS)
    return [
        {name: value for name, value in row.items() if not name.startswith(own)}
        for row in run.trained.metrics
    ]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Noting(Streams):
    """Notes the version under which each group has answered."""

    def __init__(self, delay: Callable[[int], int]):
        super().__init__(delay)
        self.drawn: dict[int, int] = {}

    def begin(self, groups: Any, **how: Any) -> None:
        super().begin(groups, **how)
        for group in groups:
            self.drawn[group.number] = self.versions[-1]


def test_the_record_has_what_each_step_took_dropped_and_of_which_versions(tmp_path: Path) -> None:
    path = tmp_path / "trained_order.jsonl"
    policy = Noting(delayed)
    run = written(made(policy, asynchronous(MOST)), path).fit(STEPS)
    found = lines(path)
    assert [line["step"] for line in found] == [*range(1, STEPS + 1)]
    assert [line["taken"] for line in found] == [[tasks] for tasks in run.trained.tasks]
    for line, metrics in zip(found, run.trained.metrics, strict=True):
        assert line["versions"] == [[[policy.drawn[number]] for number in line["taken"][0]]]
        assert len(line["dropped"]) == metrics["groups_dropped"]
    assert any(len({str(own) for own in line["versions"][0]}) > 1 for line in found)
    dropped = {number for line in found for number in line["dropped"]}
    trained = {number for line in found for number in line["taken"][0]}
    assert dropped and not dropped & trained
    under_way = {group.number for group in run.policy.under_way}
    assert dropped | trained | under_way == set(run.policy.begun)


@pytest.mark.parametrize(
    ("rounds", "steps"), [(0, STEPS), (3, 6)], ids=["all groups", "dynamic sampling"]
)
def test_a_run_replayed_from_the_record_is_the_same_bit_for_bit_in_whatever_order_groups_end(
    tmp_path: Path, rounds: int, steps: int
) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"

    def refill() -> DynamicSampler:
        return DynamicSampler(rounds)

    one = written(made(Streams(delayed), asynchronous(MOST), refill=refill()), first).fit(steps)
    other = made(Streams(scrambled), asynchronous(MOST), refill=refill()).fit(steps)
    assert one.trained.tasks != other.trained.tasks, "the order matters without the record"
    again = made(Streams(scrambled), replayed(first), refill=refill())
    written(again, second).fit(steps)
    assert again.trained.tasks == one.trained.tasks
    assert without_times(again) == without_times(one)
    assert torch.equal(again.policy.table, one.policy.table)
    assert first.read_text() == second.read_text()
    assert {metrics[DIFFERS] for metrics in again.trained.metrics} == {0.0}
    waits = max(len(line["taken"]) for line in lines(first))
    assert (waits > 1) == (rounds > 0)


def test_groups_of_other_versions_than_recorded_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trained_order.jsonl"
    one = written(made(Streams(delayed), asynchronous(MOST)), path).fit(6)
    changed = lines(path)
    changed[3]["versions"][0][0] = [0, 99]
    changed[3]["versions"][0][2].append(98)
    path.write_text("\n".join(map(json.dumps, changed)))
    again = made(Streams(scrambled), replayed(path)).fit(6)
    assert [metrics[DIFFERS] for metrics in again.trained.metrics] == [0, 0, 0, 2, 0, 0]
    assert again.trained.tasks == one.trained.tasks


class Early(Streams):
    """Says of each answer that it was drawn under the first weights."""

    def _completion(self, *given: Any) -> Any:
        versions, self.versions = self.versions, [0]
        found = super()._completion(*given)
        self.versions = versions
        return found


def test_groups_that_are_older_than_the_bound_here_are_trained_from_all_the_same(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trained_order.jsonl"
    one = written(made(Streams(delayed), asynchronous(MOST)), path).fit(8)
    again = made(Early(), replayed(path)).fit(8)
    assert again.trained.tasks == one.trained.tasks
    assert [metrics["staleness_max"] for metrics in again.trained.metrics] == [*range(8)]
    versions = [sum(own != [0] for own in line["versions"][0]) for line in lines(path)]
    assert [metrics[DIFFERS] for metrics in again.trained.metrics] == versions


def test_behind_the_end_of_the_record_groups_are_taken_as_they_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trained_order.jsonl"
    one = written(made(Streams(delayed), asynchronous(MOST)), path).fit(5)
    again = made(Streams(delayed), replayed(path)).fit(9)
    whole = made(Streams(delayed), asynchronous(MOST)).fit(9)
    assert (
        again.trained.tasks == whole.trained.tasks and again.trained.tasks[:5] == one.trained.tasks
    )
    assert [DIFFERS in metrics for metrics in again.trained.metrics] == [True] * 5 + [False] * 4
    assert caplog.text.count("ends with step 5: from step 6 on") == 1


@pytest.mark.parametrize("key", ["taken", "dropped"])
def test_a_record_of_other_groups_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "trained_order.jsonl"
    written(made(Streams(delayed), asynchronous(MOST)), path).fit(4)
    changed = lines(path)
    changed[2][key] = [[700, 701, 702]] if key == "taken" else [700]
    path.write_text("\n".join(map(json.dumps, changed)))
    with pytest.raises(ConfigError, match=r"in step 3 the groups \[700"):
        made(Streams(), replayed(path)).fit(4)


def test_a_record_that_begins_later_than_the_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trained_order.jsonl"
    written(made(Streams(delayed), asynchronous(MOST)), path).fit(4)
    path.write_text("\n".join(path.read_text().splitlines()[2:]))
    with pytest.raises(ConfigError, match="begins with step 3, and this run comes to step 1"):
        made(Streams(), replayed(path)).fit(4)


def gone_on(before: Made, after: Made, steps: int) -> Made:
    state = saved(before)
    after.policy.table.data.copy_(before.policy.table)
    after.policy.versions = [state["step"]]
    after.trainer.load_state(state)
    return after.fit(steps, skip=state["supply"]["drawn"] // BATCH)


def test_a_resumed_run_replaces_the_lines_of_the_steps_that_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "trained_order.jsonl"
    before = made(Streams(), asynchronous(MOST))
    before.fit(5)
    state_of_5 = before
    written(made(Streams(scrambled), asynchronous(MOST)), path).fit(8)
    until = lines(path)[:5]
    after = gone_on(state_of_5, written(made(Streams(), asynchronous(MOST)), path), 9)
    found = lines(path)
    assert found[:5] == until
    assert [line["step"] for line in found] == [*range(1, 10)]
    assert [line["taken"] for line in found[5:]] == [[tasks] for tasks in after.trained.tasks]
    kept = lines(tmp_path / "trained_order.left_out.jsonl")
    assert [line["step"] for line in kept] == [6, 7, 8]


def test_a_replay_goes_on_from_a_checkpoint_in_the_records_order(tmp_path: Path) -> None:
    path = tmp_path / "trained_order.jsonl"
    whole = written(made(Streams(delayed), asynchronous(MOST)), path).fit(10)
    before = made(Streams(scrambled), replayed(path))
    supply = before.trainer.prepare(
        [Prompt((1 + (BATCH * step + place) % 5,)) for place in range(BATCH)] for step in range(12)
    )
    for _, batch in zip(range(4), supply, strict=False):
        before.trainer.train_step(batch)
    after = gone_on(before, made(Streams(scrambled), replayed(path)), 10)
    assert [*before.trained.tasks, *after.trained.tasks] == whole.trained.tasks
