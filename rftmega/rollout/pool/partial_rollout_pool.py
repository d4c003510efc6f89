"""Partial rollouts on engines that share devices with the trainer: completions that are unfinished
at the end of a step continue in the next step.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from rftmega.core.interfaces import Reward, RolloutGroup, TakenGroups
from rftmega.core.rollout_arrays import packed_completions, unpacked_completions
from rftmega.core.types import Rollout, Sampling
from rftmega.rollout.pool.engine_pool import EnginePool
from rftmega.rollout.pool.gathered_rollouts import shared
from rftmega.rollout.pool.partial_rollouts import (
    PartialRollout,
    PartialRollouts,
    everywhere,
    packed_partials,
    unpacked_partials,
)
from rftmega.rollout.pool.pending_requests import Tasks

Sample = tuple[int, int]  # a group's number, and the index of its rollout


class PartialRolloutPool(EnginePool):
    """PartialRolloutPool is a RolloutEngine and a RolloutStream whose engines generate only while
    the trainer waits for groups (rollouts of one prompt). When enough groups have ended, the
    engines stop. Unfinished completions keep their tokens and continue at the next wait, with the
    newest weights (partial rollouts, Kimi k1.5, arXiv:2501.12599).

    All engines stop after the same number of steps, so repeated runs train on the same groups.
    Every process has all rollouts.
    """

    pauses_between_takes = True

    def __init__(self, *arguments: Any, **options: Any):
        """Builds the pool; a collective. All arguments are those of EnginePool."""
        super().__init__(*arguments, **options)
        self._groups: dict[int, RolloutGroup] = {}  # in progress, in the order in which they began
        # groups that end in one generation are in the order in which they began
        self._ended: dict[int, list[Rollout]] = {}
        # of unfinished groups: finished rollouts, and the partial completions of the others
        self._whole: dict[Sample, Rollout] = {}
        self._partial: dict[Sample, PartialRollout] = {}
        self._sampling = Sampling()
        self._reward: Reward | None = None

    @property
    def under_way(self) -> Sequence[RolloutGroup]:
        return [*self._groups.values()]

    def begin(
        self, groups: Sequence[RolloutGroup], *, sampling: Sampling, reward: Reward | None
    ) -> None:
        """Adds groups, which are generated from the next wait on. From now on, all groups in
        progress use this call's `sampling` and `reward`.
        """
        self._sampling, self._reward = sampling, reward
        self._groups |= {group.number: group for group in groups}

    def take(self, most: int) -> TakenGroups:
        self._generate_until(lambda ended: len(ended) >= most)
        return self._taken([*self._ended][:most])

    def take_these(self, numbers: Sequence[int]) -> TakenGroups:
        self._generate_until(lambda ended: ended.keys() >= set(numbers))
        return self._taken(numbers)

    def join(self) -> None:
        self._generate_until(lambda ended: ended.keys() >= self._groups.keys())

    def drop(self, oldest: int) -> Sequence[RolloutGroup]:
        return self.forget(
            [number for number in self._groups if self._first_version(number) < oldest]
        )

    def ended(self) -> dict[int, list[Rollout]]:
        return dict(self._ended) if self._first_process else {}

    def put(self, group: RolloutGroup, rollouts: Sequence[Rollout]) -> None:
        self._groups[group.number] = group
        self._ended[group.number] = list(rollouts)

    def forget(self, numbers: Sequence[int]) -> Sequence[RolloutGroup]:
        found = [self._groups.pop(number) for number in numbers]
        for group in found:
            self._ended.pop(group.number, None)
            for sample in _samples_of(group):
                self._whole.pop(sample, None)
                self._partial.pop(sample, None)
        return found

    def unfinished(self) -> Callable[[], dict[str, Any]]:
        if not self._first_process:
            return dict
        whole, partial = dict(self._whole), dict(self._partial)
        return lambda: {
            "limits": self._limits,
            "whole": [*map(list, whole)],
            "rollouts": packed_completions([*whole.values()]),
            "partial": [*map(list, partial)],
            "answers": packed_partials(dict(enumerate(partial.values()))),
        }

    def load_unfinished(self, state: Mapping[str, Any]) -> None:
        """Restores unfinished rollouts from `state`, the part of a checkpoint that the function
        returned by `unfinished` has made. If the token limits of completions have changed since,
        restores nothing, so that these rollouts start again.
        """
        if not state or state["limits"] != self._limits:
            return
        self._whole = {}
        rollouts = unpacked_completions(state["rollouts"])
        for (number, which), rollout in zip(state["whole"], rollouts, strict=True):
            assert rollout is not None
            self._whole[number, which] = rollout
        partial = unpacked_partials(state["answers"])
        samples = [(number, which) for number, which in state["partial"]]
        self._partial = {samples[number]: own for number, own in partial.items()}

    @property
    def _limits(self) -> list[int]:
        return [getattr(self.engine, "longest", 0), self.engine.row_tokens]

    @property
    def _first_process(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def _generate_until(self, enough: Callable[[Mapping[int, Any]], bool]) -> None:
        """Generates the groups in progress until `enough`, called with a mapping whose keys are the
        numbers of the ended groups, returns True.
        """
        if enough(self._ended):
            return
        samples = [
            sample
            for group in self._groups.values()
            if group.number not in self._ended
            for sample in _samples_of(group)
            if sample not in self._whole
        ]
        prompts = [self._groups[number].prompt for number, _ in samples]
        seeds = [self._groups[number].seeds[which] for number, which in samples]
        known = [self._partial.get(sample, {}) for sample in samples]
        # equal, so that those that began first continue first
        lengths = [1.0] * len(samples)
        partials = PartialRollouts(dict(enumerate(known)))

        def suffices(rollouts: Sequence[Rollout | None]) -> bool:
            missing = {
                number
                for (number, _), rollout in zip(samples, rollouts, strict=True)
                if rollout is None
            }
            return enough({n: None for n in self._groups if n not in missing})

        found = self._generated(
            Tasks(prompts, seeds, lengths, self._sampling), self._reward, suffices, partials
        )
        unfinished = {
            place: own
            for place, own in partials.noted.items()
            if self.speaks and found[place] is None
        }
        noted = everywhere(unfinished, self.host)
        for place, (sample, rollout) in enumerate(zip(samples, found, strict=True)):
            if rollout is not None:
                self._whole[sample] = rollout
                self._partial.pop(sample, None)
            elif place in noted:
                self._partial[sample] = noted[place]
        for group in self._groups.values():
            own = _samples_of(group)
            if group.number not in self._ended and self._whole.keys() >= set(own):
                self._ended[group.number] = [self._whole.pop(sample) for sample in own]

    def _taken(self, numbers: Sequence[int]) -> TakenGroups:
        rollouts = [rollout for number in numbers for rollout in self._ended[number]]
        return TakenGroups(self.forget(numbers), shared(rollouts, self.host))

    def _first_version(self, number: int) -> float:
        """Returns the oldest weight version of the tokens of group `number`; infinity if the group
        has no tokens yet.
        """
        samples = _samples_of(self._groups[number])
        rollouts = self._ended.get(number) or [
            self._whole[sample] for sample in samples if sample in self._whole
        ]
        versions = [version for rollout in rollouts for version in rollout.versions]
        for sample in samples:
            completions = self._partial.get(sample, {}).values()
            versions += [version for own in completions for version in own.completion.versions]
        return min(versions, default=math.inf)


def _samples_of(group: RolloutGroup) -> Collection[Sample]:
    return [(group.number, which) for which in range(len(group.seeds))]
