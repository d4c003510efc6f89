"""Buffer of the experience of earlier steps, stored on the host to be trained on again."""

import base64
import io
from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from rftmega.core.interfaces import Host, OneProcess
from rftmega.core.media_positions import RowImages
from rftmega.core.ragged import Ragged
from rftmega.core.types import Experience

NAMES = {"pictures": "images"}  # fields of checkpoints before 2026-11-27


class ReplayBuffer:
    """Stores whole groups in arrival order. Indexing returns a single row as an Experience;
    `Experience.join` collates rows (`StrategyBase.setup_dataloader(buffer, n,
    collate_fn=Experience.join)`).
    """

    def __init__(self, limit: int = 0, *, cpu_offload: bool = True, host: Host | None = None):
        """`limit`: the maximum number of rows, beyond which the oldest groups are dropped (0:
        unlimited). `cpu_offload`: move rows to the CPU, otherwise leave them on their device.
        `host`: stores the rows, one copy per host.
        """
        self.limit, self.cpu_offload = limit, cpu_offload
        self.host = host or OneProcess()
        self.groups: deque[Experience[Ragged]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def __getitem__(self, row: int) -> Experience[Ragged]:
        place = row
        for group in self.groups:
            if 0 <= place < len(group):
                return group.select(torch.tensor([place]))
            place -= len(group)
        raise IndexError(f"Row {row} of {len(self)}.")

    def append(self, experience: Experience[Ragged], group: Tensor) -> int:
        """Adds the rows of `experience`, group by group; `group` [B] int64 is the group number of
        each row. Returns the number of old groups that were dropped because of the limit.

        Raises ValueError for a group that is larger than the limit.
        """
        dropped = 0
        indices = [(group == number).nonzero()[:, 0] for number in group.unique().tolist()]
        largest = max(map(len, indices))
        if 0 < self.limit < largest:
            raise ValueError(
                f"A group of {largest} rows does not fit the buffer's limit of {self.limit}. Raise the limit."
            )
        for rows in self.host.once(lambda: [self._kept(experience.select(i)) for i in indices]):
            self.groups.append(rows)
            while self.limit and len(self) > self.limit:
                self.groups.popleft()
                dropped += 1
        return dropped

    def drop_older(self, version: int) -> int:
        """Drops whole groups that have a token sampled by a policy before `version`. Returns the
        number of dropped groups.
        """
        fresh = [group for group in self.groups if oldest(group) >= version]
        dropped, self.groups = len(self.groups) - len(fresh), deque(fresh)
        return dropped

    def _kept(self, rows: Experience[Ragged]) -> Experience[Ragged]:
        """Returns a copy of the rows, so that the batch they were selected from can be freed."""
        where = torch.device("cpu") if self.cpu_offload else None

        def copied(value: Any) -> Any:
            if isinstance(value, Ragged):
                return value.with_values(value.flat.to(where, copy=True))
            return value.to(where)

        return rows.changed(copied)

    def state(self) -> dict[str, Any]:
        """Returns all groups as JSON, except for their tensors, which are not copied."""
        return {
            "groups": [
                {
                    each.name: _packed(getattr(group, each.name))
                    for each in fields(group)
                    if each.name != "teachers"  # they are asked again
                }
                for group in self.groups
            ]
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        given = state["groups"]
        if isinstance(given, str):  # of a checkpoint of format 2
            given = torch.load(io.BytesIO(base64.b64decode(given)), weights_only=True)
        groups = [
            {
                NAMES.get(name, name): _unpacked(value)
                for name, value in group.items()
                if name != "teachers"
            }
            for group in given
        ]
        # groups in a checkpoint before format 5 are padded
        self.groups = deque(Experience(**group).ragged() for group in groups)


def _packed(value: Any) -> Any:
    if isinstance(value, RowImages):
        return {"images": value.state()}
    if isinstance(value, dict):
        return {"columns": {name: _packed(column) for name, column in value.items()}}
    return {"values": value.flat, "lengths": value.lengths} if isinstance(value, Ragged) else value


def _unpacked(value: Any) -> Any:
    if (
        isinstance(value, dict)
        and (known := value.get("images", value.get("pictures"))) is not None
    ):
        return RowImages.from_state(known)
    if isinstance(value, dict) and "columns" in value:
        return {name: _unpacked(column) for name, column in value["columns"].items()}
    return Ragged.packed(**value) if isinstance(value, dict) and "lengths" in value else value


def oldest(experience: Experience[Ragged]) -> int:
    """Returns the oldest policy version that sampled a token of the experience; 0 if no token was
    sampled.

    Raises ValueError if the experience has no versions.
    """
    if experience.versions is None:
        raise ValueError(
            "The experience does not say which policy chose its tokens (versions), so its age is not known."
        )
    versions = experience.versions.flat
    chosen = versions[versions >= 0]
    return int(chosen.min()) if len(chosen) else 0
