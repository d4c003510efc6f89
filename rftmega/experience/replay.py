"""Experience of earlier steps, on the host, to be learnt from again."""

import base64
import io
from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from rftmega.experience.pinned import pinned
from rftmega.types import Experience


class ReplayBuffer:
    """Whole groups in the order in which they came. Its items are rows, each an Experience of one;
    `Experience.join` collates them (`StrategyBase.setup_dataloader(buffer, n,
    collate_fn=Experience.join)`).
    """

    def __init__(self, limit: int = 0, *, cpu_offload: bool = True):
        """`limit`: rows; where there would be more, the oldest groups go (0: never). `cpu_offload`:
        rows wait on the host, where there is a device in page-locked memory; otherwise where they
        are.
        """
        self.limit, self.cpu_offload = limit, cpu_offload
        self.groups: deque[Experience] = deque()

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def __getitem__(self, row: int) -> Experience:
        place = row
        for group in self.groups:
            if 0 <= place < len(group):
                return group.select(torch.tensor([place]))
            place -= len(group)
        raise IndexError(f"Row {row} of {len(self)}.")

    def append(self, experience: Experience, group: Tensor) -> int:
        """Adds rows; `group` [B] int64 says which belong together. How many groups went to make
        room.

        Raises ValueError for a group that is larger than the limit.
        """
        dropped = 0
        for number in group.unique().tolist():
            rows = experience.select((group == number).nonzero()[:, 0])
            if 0 < self.limit < len(rows):
                raise ValueError(
                    f"A group of {len(rows)} rows does not fit the buffer's limit of {self.limit}. Raise the limit."
                )
            if self.cpu_offload:
                rows = rows.to(torch.device("cpu")).changed(pinned)
            self.groups.append(rows)
            while self.limit and len(self) > self.limit:
                self.groups.popleft()
                dropped += 1
        return dropped

    def drop_older(self, version: int) -> int:
        """Drops groups with a token that a policy before `version` chose, whole. How many."""
        fresh = [group for group in self.groups if oldest(group) >= version]
        dropped, self.groups = len(self.groups) - len(fresh), deque(fresh)
        return dropped

    def state(self) -> dict[str, Any]:
        """Returns all groups, as JSON has it but for their tensors, which are not copied."""
        return {
            "groups": [
                {f.name: getattr(group, f.name) for f in fields(group)} for group in self.groups
            ]
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        given = state["groups"]
        if isinstance(given, str):  # of a checkpoint of format 2
            given = torch.load(io.BytesIO(base64.b64decode(given)), weights_only=True)
        groups = [Experience(**group) for group in given]
        self.groups = deque(
            [group.changed(pinned) for group in groups] if self.cpu_offload else groups
        )


def oldest(experience: Experience) -> int:
    """Returns the first policy version that chose one of the tokens.

    Raises ValueError where versions are not known.
    """
    if experience.versions is None:
        raise ValueError(
            "The experience does not say which policy chose its tokens (versions), so its age is not known."
        )
    chosen = experience.versions[experience.versions >= 0]
    return int(chosen.min()) if len(chosen) else 0
