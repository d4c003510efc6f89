"""Collection of completions as they arrive, and of the groups whose completions are all finished."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from rftmega.core.interfaces import Enough, Reward
from rftmega.core.ragged import Ragged
from rftmega.core.rollout_arrays import selected
from rftmega.core.types import Prompt, Rollout, Samples
from rftmega.trainer.experience import collect, complete


class Wanted(NamedTuple):
    """Wanted is the number of groups to wait for, and the test `good` that a group must pass to be
    counted.
    """

    groups: int
    good: Callable[[Samples[Ragged]], bool]


class GroupCollector:
    """Collects the completions of `requests`, in which each prompt occurs `size` times in
    succession; `reward` scores them. The completions of one prompt are a group.
    """

    def __init__(self, requests: Sequence[Prompt], reward: Reward, size: int):
        self.requests, self.reward, self.size = requests, reward, size

    def collected(
        self, rollouts: Sequence[Rollout | None], places: Sequence[int] | None = None
    ) -> Samples[Ragged]:
        """Returns the scored rows of the groups whose indices are in `places`; None: of all
        complete groups. `rollouts`: one per request, None if unfinished.

        The samples' `group` is the index of the group among all groups.
        """
        places = self._whole(rollouts) if places is None else places
        rows = [
            row for place in places for row in range(place * self.size, (place + 1) * self.size)
        ]
        prompts = [self.requests[row] for row in rows]
        completions = complete(selected(rollouts, rows))
        samples = collect(prompts, completions, self.reward, samples_per_prompt=self.size)
        return replace(samples, group=torch.tensor(places)[samples.group])

    def until(self, wanted: Wanted) -> Enough:
        """Returns a function that tests whether as many good groups as `wanted` requires are
        complete.

        It evaluates each group only once, when the group is complete.
        """
        verdicts: dict[int, bool] = {}

        def enough(rollouts: Sequence[Rollout | None]) -> bool:
            for place in self._whole(rollouts):
                if place in verdicts:
                    continue
                begin = place * self.size
                lost = [bool(each and each.lost) for each in rollouts[begin : begin + self.size]]
                good = not all(lost) and wanted.good(self.collected(rollouts, [place]))
                verdicts[place] = good
            return sum(verdicts.values()) >= wanted.groups

        return enough

    def _whole(self, rollouts: Sequence[Rollout | None]) -> list[int]:
        begins = range(0, len(rollouts), self.size)
        return [
            place
            for place, begin in enumerate(begins)
            if None not in rollouts[begin : begin + self.size]
        ]
