"""Receives a step's rollouts from a channel, on every process its own portion."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from rftmega.core.types import Prompt, Rollout
from rftmega.runtime.parallel.collectives import gather_objects


@dataclass(frozen=True, slots=True)
class SentRollout:
    """SentRollout is one rollout of a prompt, as a producer puts it into a channel.

    Rollouts of one prompt have the same `group`, and `number` counts them from 0. The trajectories
    are `rollout.trajectories`; `rollout.scores` may be None, and the actor's reward then scores the
    rollout.
    """

    group: int
    number: int
    prompt: Prompt
    rollout: Rollout


class Channel(Protocol):
    """Channel passes rollouts from producers to an actor, such as an `asyncio.Queue`."""

    async def get(self) -> SentRollout: ...

    async def put(self, item: SentRollout) -> None: ...


def portion(total: int, rank: int, size: int) -> int:
    """Returns the number of items of process `rank` if `total` items are split over `size`
    processes as evenly as possible.
    """
    return total * (rank + 1) // size - total * rank // size


async def receive(channel: Channel, number: int) -> list[SentRollout]:
    """Takes `number` rollouts from the channel; then returns the rollouts of all processes, ordered
    by group and number, whatever the order of their arrival. A collective.
    """
    own = [await channel.get() for _ in range(number)]
    everywhere = [sent for part in gather_objects(own) for sent in part]
    return sorted(everywhere, key=lambda sent: (sent.group, sent.number))


def check(received: Sequence[SentRollout], *, size: int, step: int) -> None:
    """Raises ValueError unless every group has `size` rollouts, numbered from 0, whose tokens the
    weights of version `step` have chosen.
    """
    for group, sent in groupby(received, key=lambda sent: sent.group):
        numbers = [each.number for each in sent]
        if numbers != list(range(size)):
            raise ValueError(
                f"Group {group} has the rollouts {numbers}, but rollout.samples_per_prompt={size} asks for those from 0 to "
                f"{size - 1}, each once. Give each prompt's rollouts one group number, and count them."
            )
    versions = {version for sent in received for version in sent.rollout.versions}
    if versions - {step}:
        raise ValueError(
            f"Tokens of policy versions {sorted(versions)} at global step {step}: call set_global_step and then "
            "sync_model_to_rollout before the engine generates."
        )
