"""TrainedGroups is the record of the groups that a step of an asynchronous run took, in order;
another run can replay the record.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rftmega.core.interfaces import TakenGroups


@dataclass(frozen=True)
class TrainedGroups:
    """TrainedGroups holds the numbers of the groups that a step took, in their order, and of the
    groups that it dropped.
    """

    # a list per wait of the step: several if groups were left out
    taken: list[list[int]]
    # for each of these groups the policy versions that sampled its tokens, ascending
    versions: list[list[list[int]]]
    dropped: list[int]

    @staticmethod
    def of(taken: Sequence[TakenGroups], dropped: Sequence[int]) -> "TrainedGroups":
        """Returns the record of a step: `taken` has the groups of each wait, `dropped` the numbers
        of dropped groups.
        """
        return TrainedGroups(
            [[group.number for group in each.groups] for each in taken],
            [_versions(each) for each in taken],
            list(dropped),
        )

    def differing(self, other: "TrainedGroups") -> int:
        """Returns how many groups of `other`, a record of the same step, have tokens of other
        policy versions there than in this record.
        """
        ours = _by_number(self)
        return sum(ours.get(number) != own for number, own in _by_number(other).items())


def read_order(path: str | Path) -> dict[int, TrainedGroups]:
    """Reads the file that `monitoring.observers.trained_order` wrote. Returns the groups of each
    step, by step number, counted as in metrics.jsonl. The file must have been validated before.
    """
    lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line]
    return {
        line["step"]: TrainedGroups(line["taken"], line["versions"], line["dropped"])
        for line in lines
    }


def _versions(taken: TakenGroups) -> list[list[int]]:
    found, begin = [], 0
    for group in taken.groups:
        own = taken.rollouts[begin : begin + len(group.seeds)]
        begin += len(group.seeds)
        found.append(sorted({version for each in own if each for version in each.versions}))
    return found


def _by_number(trained: TrainedGroups) -> dict[int, list[int]]:
    numbers = [number for each in trained.taken for number in each]
    versions = [own for each in trained.versions for own in each]
    return dict(zip(numbers, versions, strict=True))
