"""Copies that are done together are those that they stand for."""

import random

import pytest
import torch

from rftmega.weights.message import copy_together
from rftmega.weights.recording import Geometry
from rftmega.weights.replay import Run, runs_of


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_the_views_that_they_stand_for(seed: int) -> None:
    rng = random.Random(seed)
    views, offset = list[Geometry](), 0
    for _ in range(40):
        offset += rng.choice([8, 8, 8, 8, 12, -20, 0])
        views.append(Geometry((2, rng.choice([3, 3, 3, 4])), (4, 1), offset))
    runs = runs_of(views)
    meant = [
        run.first._replace(offset=run.first.offset + place * run.step)
        for run in runs
        for place in range(run.number)
    ]
    assert meant == views
    assert len(runs) < len(views)


def test_evenly_spaced_views_are_one_run() -> None:
    views = [Geometry((2, 3), (3, 1), 5 + 12 * place) for place in range(9)]
    assert runs_of(views) == [Run(9, 12, views[0])]


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(3, 2, 4),
        torch.zeros(3, 4, 4)[:, :2],
        torch.zeros(3, 2, 4).double(),
        torch.zeros(3, 2, 4)[:1],
    ],
)
def test_views_that_are_copied_together_come_to_their_places(target: torch.Tensor) -> None:
    views = [torch.randn(2, 8)[:, ::2] for _ in target]
    copy_together(target, views)
    assert torch.equal(target, torch.stack(views).to(target.dtype))
