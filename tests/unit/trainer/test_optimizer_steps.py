"""A rollout's epochs and mini-batches."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.config import load
from rftmega.core.errors import Preempted
from rftmega.core.types import COUNT, Experience, TokenStats
from rftmega.trainer.algorithm import Algorithm
from rftmega.trainer.experience import given
from rftmega.trainer.journal import Journal
from rftmega.trainer.optimizer_steps import Schedule, merged, take_steps
from tests.layouts import rows_of

EXPERIENCE = given(rows_of([[1, 2, token] for token in range(10)]))
TEN = torch.ones(10, dtype=torch.int64)


class Notes:
    """Takes no step; each metric is the number of the step."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def step(self, experience: Experience, loss_fn: Any, **settings: Any) -> dict[str, float]:
        self.rows.append(experience.tokens[:, 2].tolist())
        if "scored" in settings:
            settings["scored"](TokenStats(experience.advantage, None))
        return {
            "loss": float(len(self.rows)),
            "optimizer_steps": 1.0,
            "skipped_steps": 0.0,
            COUNT + "tokens": 10.0,
        }


def test_one_epoch_takes_the_rows_in_the_order_of_the_rollout() -> None:
    assert [part.tolist() for part in Schedule(3).mini_batches(TEN, step=4)] == [
        [0, 1, 2, 3],
        [4, 5, 6],
        [7, 8, 9],
    ]
    assert [part.tolist() for part in Schedule(3).mini_batches(torch.full((4,), 2), step=4)] == [
        [0, 1, 2, 3],
        [4, 5],
        [6, 7],
    ]
    few = Schedule(5).mini_batches(torch.tensor([1, 1]), step=0)
    assert [part.tolist() for part in few] == [[0], [1]], "no mini-batch without a row"


def test_rows_of_one_rollout_stay_in_one_mini_batch() -> None:
    sizes = torch.tensor([1, 3, 1, 2])
    assert [part.tolist() for part in Schedule(2).mini_batches(sizes, step=0)] == [
        [0, 1, 2, 3],
        [4, 5, 6],
    ]
    _, _, *shuffled = Schedule(2, epochs=2).mini_batches(sizes, step=0)
    assert sorted(torch.cat(shuffled).tolist()) == list(range(7))
    for rows in ([1, 2, 3], [5, 6]):
        assert any(set(rows) <= set(part.tolist()) for part in shuffled)


def test_further_epochs_learn_every_row_once_more_in_another_order_that_the_seed_and_the_step_decide() -> (
    None
):
    def orders(seed: int, step: int) -> list[list[int]]:
        parts = Schedule(2, epochs=3, seed=seed).mini_batches(torch.full((6,), 2), step)
        assert len(parts) == 2 * 3
        return [torch.cat(parts[2 * epoch : 2 * epoch + 2]).tolist() for epoch in range(3)]

    first, *further = orders(seed=0, step=5)
    assert first == list(range(12))
    for order in further:
        assert sorted(order) == first
        assert order != first
        assert all(
            order[place + 1] == order[place] + 1 and order[place] % 2 == 0
            for place in range(0, 12, 2)
        ), "pairs stay pairs"
    assert further[0] != further[1]
    assert orders(0, 5) == [first, *further]
    assert orders(0, 6)[1:] != further
    assert orders(1, 5)[1:] != further


def test_metrics_are_means_over_the_steps_taken_and_counts_are_sums() -> None:
    model = Notes()
    found = take_steps(model, EXPERIENCE, None, Schedule(2, epochs=2).mini_batches(TEN, 0))  # type: ignore[arg-type]
    assert model.rows[:2] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert found == {
        "loss": 2.5,
        "optimizer_steps": 4.0,
        "skipped_steps": 0.0,
        COUNT + "tokens": 40.0,
    }
    broken = {
        "loss": torch.nan,
        "optimizer_steps": 0.0,
        "skipped_steps": 1.0,
        "memory_update_adam_mib": 7.0,
    }
    good = {
        "loss": 3.0,
        "optimizer_steps": 1.0,
        "skipped_steps": 0.0,
        "memory_update_adam_mib": 5.0,
    }
    assert merged([broken, good]) == {
        "loss": 3.0,
        "optimizer_steps": 1.0,
        "skipped_steps": 1.0,
        "memory_update_adam_mib": 7.0,
    }


def test_a_step_without_anything_to_learn_is_counted_and_in_no_mean() -> None:
    empty = {"loss": 0.0, "optimizer_steps": 0.0, "skipped_steps": 0.0, "empty_steps": 1.0}
    good = {"loss": 3.0, "optimizer_steps": 1.0, "skipped_steps": 0.0, "empty_steps": 0.0}
    assert merged([empty, good, good]) == {
        "loss": 3.0,
        "optimizer_steps": 2.0,
        "skipped_steps": 0.0,
        "empty_steps": 1.0,
    }
    assert merged([empty, empty])["empty_steps"] == 2


def test_steps_that_were_taken_before_a_resume_are_not_taken_again_but_counted() -> None:
    parts = Schedule(4).mini_batches(TEN, 0)
    first, again = Notes(), Notes()
    journal = Journal(stop=lambda: len(first.rows) == 2)
    with pytest.raises(Preempted):
        take_steps(first, EXPERIENCE, None, parts, journal=journal)  # type: ignore[arg-type]
    resumed = Journal()
    resumed.load_state(journal.state())
    found = take_steps(again, EXPERIENCE, None, parts, journal=resumed)  # type: ignore[arg-type]
    whole = Notes()
    take_steps(whole, EXPERIENCE, None, parts)  # type: ignore[arg-type]
    assert first.rows + again.rows == whole.rows
    assert found[COUNT + "tokens"] == 40.0


def test_log_probs_of_the_steps_own_forward_pass_are_told_after_a_resume_too() -> None:
    told: list[int] = []
    journal, model = Journal(stop=lambda: True), Notes()
    settings: dict[str, Any] = {"scored": lambda stats: told.append(len(stats.logp))}
    with pytest.raises(Preempted):
        take_steps(
            model, EXPERIENCE, None, Schedule().mini_batches(TEN, 0), journal=journal, **settings
        )  # type: ignore[arg-type]
    resumed = Journal()
    resumed.load_state(journal.state())
    take_steps(
        SimpleNamespace(step=None),
        EXPERIENCE,
        None,
        Schedule().mini_batches(TEN, 0),
        journal=resumed,
        **settings,
    )  # type: ignore[arg-type]
    assert told == [10, 10]
    with pytest.raises(AssertionError, match="only a single step's forward pass"):
        take_steps(model, EXPERIENCE, None, Schedule(2).mini_batches(TEN, 0), **settings)  # type: ignore[arg-type]


def test_a_rollout_is_split_as_the_options_say(config_file: Path) -> None:
    given = ["updates_per_epoch=2", "epochs_per_rollout=3"]
    config = load(config_file, ["trainer.seed=5", *(f"algorithm.{each}" for each in given)])
    assert Algorithm(config).schedule == Schedule(2, 3, seed=5)
