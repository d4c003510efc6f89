"""Many rollouts stored in a few tensors, to be shared, sent or saved."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from rftmega.core import expert_routes
from rftmega.core.ragged import Ragged
from rftmega.core.types import Rollout, Trajectory, Turn

# name -> dtype of each of a trajectory's arrays
COLUMNS = {
    "token_ids": torch.int32,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "versions": torch.int32,
}
ROUTES = "routes"  # one more column, of vectors, if engines report expert routes


class TrajectoryPlace(NamedTuple):
    """Position of a trajectory in the columns of RolloutArrays, and the trajectory's attributes
    that the columns don't hold.
    """

    start: int
    length: int
    truncated: bool
    turns: tuple[Turn, ...] = ()


class RolloutPlace(NamedTuple):
    """Positions of a rollout's trajectories in the columns of RolloutArrays, and the rollout's
    other attributes.
    """

    trajectories: tuple[TrajectoryPlace, ...]
    scores: dict[str, float] | None
    rewards: dict[str, float] = {}  # noqa: RUF012  never modified
    measures: dict[str, float] = {}  # noqa: RUF012
    lost: str = ""
    score_zero: bool = False

    def moved(self, by: int) -> "RolloutPlace":
        """Returns a copy in which the start positions of all trajectories are moved by `by`
        elements.
        """
        own = tuple(each._replace(start=each.start + by) for each in self.trajectories)
        return self._replace(trajectories=own)


@dataclass(frozen=True, eq=False)
class RolloutArrays(Sequence[Rollout | None]):
    """RolloutArrays is a sequence of rollouts whose trajectories lie in the four columns of
    COLUMNS.

    Indexing returns a rollout whose trajectories are views; nothing is copied.
    """

    columns: dict[str, Tensor]  # the columns of COLUMNS, [N] each, and perhaps ROUTES, [N, ...]
    places: list[RolloutPlace | None]  # one per rollout; None for a missing one

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        """Returns the columns as NumPy arrays, which create views faster."""
        return {name: self.columns[name].numpy() for name in COLUMNS}

    @cached_property
    def _taken(self) -> list[Rollout | None]:
        """Returns the cache of rollouts that were already built; None for each other rollout."""
        return [None] * len(self.places)

    @staticmethod
    def of(rollouts: Sequence[Rollout | None]) -> "RolloutArrays":
        """Packs rollouts into columns; returns `rollouts` itself if it is a RolloutArrays already."""
        if isinstance(rollouts, RolloutArrays):
            return rollouts
        there = [rollout for rollout in rollouts if rollout is not None]
        trajectories = [own for rollout in there for own in rollout.trajectories]
        empty = Trajectory.of()
        columns = {}
        for name in COLUMNS:
            arrays = [getattr(own, name) for own in (empty, *trajectories)]
            columns[name] = torch.from_numpy(np.concatenate(arrays))
        if (routes := _routes_of(trajectories)) is not None:
            columns[ROUTES] = routes
        places: list[RolloutPlace | None] = []
        start = 0
        for rollout in rollouts:
            if rollout is None:
                places.append(None)
                continue
            own_places = []
            for own in rollout.trajectories:
                own_places.append(TrajectoryPlace(start, len(own), own.truncated, own.turns))
                start += len(own)
            places.append(
                RolloutPlace(
                    tuple(own_places),
                    rollout.scores,
                    rollout.rewards,
                    rollout.measures,
                    rollout.lost,
                    rollout.score_zero,
                )
            )
        return RolloutArrays(columns, places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, rollout: object) -> bool:
        return rollout in self.places if rollout is None else rollout in list(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    @overload
    def __getitem__(self, index: int) -> Rollout | None: ...

    @overload
    def __getitem__(self, index: slice) -> "RolloutArrays": ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        place = self.places[index]
        if place is not None and self._taken[index] is None:
            trajectories = tuple(map(self._trajectory, place.trajectories))
            self._taken[index] = Rollout(trajectories, *place[1:])
        return self._taken[index]

    def select(self, index: Iterable[int]) -> "RolloutArrays":
        """Returns the rollouts at `index`; copies nothing."""
        rows = list(index)
        found = RolloutArrays(self.columns, [self.places[row] for row in rows])
        vars(found)["_taken"] = [self._taken[row] for row in rows]
        return found

    def column(self, name: str) -> Ragged:
        """Returns a column of COLUMNS as a Ragged with one row per trajectory, rollout by rollout."""
        there = [place for place in self.places if place is not None]
        rows = [own for place in there for own in place.trajectories]
        starts = torch.tensor([own.start for own in rows], dtype=torch.int64)
        lengths = torch.tensor([own.length for own in rows], dtype=torch.int64)
        return Ragged(self.columns[name], starts, lengths)

    def _trajectory(self, place: TrajectoryPlace) -> Trajectory:
        own = slice(place.start, place.start + place.length)
        ids, mask, logprobs, versions = (self._arrays[name][own] for name in COLUMNS)
        routes = self.columns[ROUTES][own] if ROUTES in self.columns else None
        return Trajectory(ids, mask, logprobs, versions, place.truncated, routes, place.turns)


def _routes_of(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """Returns the concatenated routes of all trajectories; None if no trajectory has routes."""
    known = [own.routes for own in trajectories if own.routes is not None]
    if not known:
        return None
    nothing = known[0][:0]
    parts = []
    for own in trajectories:
        told = nothing if own.routes is None else own.routes
        parts.append(expert_routes.to_length(told, len(own)))
    return torch.cat(parts)


def selected(rollouts: Sequence[Rollout | None], index: Sequence[int]) -> RolloutArrays:
    """Returns the rollouts at `index` as RolloutArrays; copies nothing if `rollouts` are
    RolloutArrays already.
    """
    if isinstance(rollouts, RolloutArrays):
        return rollouts.select(index)
    return RolloutArrays.of([rollouts[row] for row in index])


def packed_completions(rollouts: Sequence[Rollout | None]) -> dict[str, Any]:
    """Returns rollouts as plain data: the columns; for each rollout its number of trajectories and
    the other fields of RolloutPlace; for each trajectory its length, truncation, start and turns.
    """
    arrays = RolloutArrays.of(rollouts)
    trajectories: list[list[Any]] = []
    numbered: list[list[Any] | None] = []
    for place in arrays.places:
        if place is None:
            numbered.append(None)
            continue
        numbered.append([len(place.trajectories), *place[1:]])
        for own in place.trajectories:
            trajectories.append([own.length, own.truncated, own.start, list(map(list, own.turns))])
    return arrays.columns | {"trajectories": trajectories, "rollouts": numbered}


def unpacked_completions(packed: dict[str, Any]) -> RolloutArrays:
    """Restores rollouts from the plain data that `packed_completions` returned."""
    places, end = [], 0
    for said in packed["trajectories"]:
        length, truncated, *more = said
        begin = more[0] if more else end  # format 4 has no starts: trajectories are contiguous
        turns = tuple(Turn(*turn) for turn in more[1]) if len(more) > 1 else ()
        places.append(TrajectoryPlace(begin, length, truncated, turns))
        end = begin + length
    left = iter(places)
    rollouts: list[RolloutPlace | None] = []
    for said in packed["rollouts"]:
        if said is None:
            rollouts.append(None)
        else:
            count, *known = said
            rollouts.append(RolloutPlace(tuple(itertools.islice(left, count)), *known))
    columns = {name: packed[name] for name in COLUMNS}
    # older checkpoints have a list, the routes of a trajectory's last completion
    if isinstance(packed.get(ROUTES), Tensor):
        columns[ROUTES] = packed[ROUTES]
    return RolloutArrays(columns, rollouts)
