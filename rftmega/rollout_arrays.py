"""Many rollouts as a few arrays, to be sent or saved."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rftmega.types import Rollout, Trajectory

Array = NDArray[Any]
NAMES = ("token_ids", "loss_mask", "logprobs", "versions")  # of a trajectory's arrays


@dataclass(frozen=True, slots=True)
class RolloutArrays:
    """RolloutArrays holds the trajectories of many rollouts behind each other.

    A trajectory has five small arrays; pickling each costs more than generating a short answer.
    """

    token_ids: Array
    loss_mask: Array
    logprobs: Array
    versions: Array
    trajectories: list[tuple[int, bool]]  # length of each, and whether it is truncated
    routes: list[Tensor | None]  # of each
    # of each rollout: how many trajectories it has, and its scores; None where there is none
    rollouts: list[tuple[int, dict[str, float] | None] | None]

    @staticmethod
    def of(rollouts: Sequence[Rollout | None]) -> "RolloutArrays":
        there = [rollout for rollout in rollouts if rollout is not None]
        trajectories = [own for rollout in there for own in rollout.trajectories]
        empty = Trajectory.of()
        joined = [
            np.concatenate([getattr(own, name) for own in (empty, *trajectories)]) for name in NAMES
        ]
        return RolloutArrays(
            joined[0],
            joined[1],
            joined[2],
            joined[3],
            [(len(own), own.truncated) for own in trajectories],
            [own.routes for own in trajectories],
            [
                None if rollout is None else (len(rollout.trajectories), rollout.scores)
                for rollout in rollouts
            ],
        )

    def unpacked(self) -> list[Rollout | None]:
        """Returns the rollouts; their arrays are views of these."""
        ends = list(itertools.accumulate(size for size, _ in self.trajectories))
        trajectories = iter(
            [
                Trajectory(
                    self.token_ids[end - size : end],
                    self.loss_mask[end - size : end],
                    self.logprobs[end - size : end],
                    self.versions[end - size : end],
                    truncated,
                    routes,
                )
                for end, (size, truncated), routes in zip(
                    ends, self.trajectories, self.routes, strict=True
                )
            ]
        )
        found: list[Rollout | None] = []
        for said in self.rollouts:
            if said is None:
                found.append(None)
            else:
                count, scores = said
                found.append(Rollout(tuple(itertools.islice(trajectories, count)), scores))
        return found
