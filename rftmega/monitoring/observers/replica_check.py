"""Compares the weights that several processes hold copies of, to find a process whose memory or
device is faulty (silent data corruption) before its weights are saved.
"""

import hashlib
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rftmega.core.errors import NodeFault
from rftmega.core.shards import ShardBox
from rftmega.core.types import Metrics
from rftmega.monitoring.observers.observer import Observer
from rftmega.runtime.parallel.checksum import checksums
from rftmega.runtime.parallel.collectives import gather_objects

KINDS = ("weights/", "average/")  # of which data-parallel processes hold the same
NAMED = 3  # most tensors that are named


class Trained(Protocol):
    """Trained is a model in training: see checkpoints.run_checkpoints.TrainedModel."""

    def training_tensors(self) -> Iterable[ShardBox]: ...


class HeldContent(NamedTuple):
    """HeldContent is what a process says of its part of the models: `holding` identifies which boxes of
    which tensors it has, and `content` what is in them.
    """

    host: str
    holding: str
    content: str


class ReplicaCheck(Observer):
    """ReplicaCheck is a callback that compares the copies of all models' weights after every
    `every`-th step. It runs on every process, before the checkpoint of the step is saved.
    """

    def __init__(self, models: Mapping[str, Trained], *, every: int):
        self.models, self.every = models, every

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        """Raises NodeFault on all processes if copies differ."""
        if trainer.step % self.every == 0:
            check_replicas(self.models, step=trainer.step)


def check_replicas(models: Mapping[str, Trained], *, step: int) -> None:
    """Compares the weights of all processes that hold the same parts of the models; a collective.

    Raises NodeFault on all processes if they differ, with the ranks and tensors.
    """
    sums = sums_of(models)
    holding = hashlib.sha256("\n".join(sums).encode()).hexdigest()
    content = hashlib.sha256(repr(list(sums.values())).encode()).hexdigest()
    copies: list[HeldContent] = gather_objects(HeldContent(socket.gethostname(), holding, content))
    different = {
        each for each in {copy.holding for copy in copies} if len(_contents(copies, each)) > 1
    }
    if not different:
        return
    # only now all checksums, of those that differ
    told: list[dict[str, int]] = gather_objects(sums if holding in different else {})
    raise NodeFault(
        f"step {step}: "
        + " ".join(_described(each, copies, told) for each in sorted(different))
        + " The memory, the device or a link of a host is faulty, or its parameters were gathered wrongly. Nothing of this step "
        "was saved; test the host, and start the run again without it: it resumes from its last checkpoint "
        "(faults.check_replicas_every)."
    )


def sums_of(models: Mapping[str, Trained]) -> dict[str, int]:
    """Returns a checksum of each box of weights that this process holds, by the box's name."""
    names: list[str] = []
    found: list[Tensor] = []
    for name, model in models.items():
        # weights come first
        for box in takewhile(lambda box: box.key.startswith(KINDS), model.training_tensors()):
            names.append(f"{name} {box.key} {box.offset} {tuple(box.tensor.shape)}")
            found.append(checksums(box.tensor.detach().reshape(1, -1)))
    by_device: dict[torch.device, list[int]] = {}
    for number, each in enumerate(found):
        by_device.setdefault(each.device, []).append(number)
    sums = [0] * len(found)
    for numbers in by_device.values():
        values = torch.cat([found[number] for number in numbers]).tolist()
        for number, value in zip(numbers, values, strict=True):
            sums[number] = value
    return dict(zip(names, sums, strict=True))


def _contents(copies: Sequence[HeldContent], holding: str) -> Counter[str]:
    return Counter(copy.content for copy in copies if copy.holding == holding)


def _described(
    holding: str, copies: Sequence[HeldContent], told: Sequence[Mapping[str, int]]
) -> str:
    """Returns a sentence on the processes that hold the same parts: which of them differ from most,
    and in which tensors.
    """
    here = [(rank, copy) for rank, copy in enumerate(copies) if copy.holding == holding]
    (most, times), *others = _contents(copies, holding).most_common()
    tied = times == others[0][1]
    odd = [(rank, copy) for rank, copy in here if tied or copy.content != most]
    good = next(rank for rank, copy in here if copy.content == most)
    boxes = [
        key
        for key, value in told[good].items()
        if any(told[rank][key] != value for rank, _ in here)
    ]
    tensors = list(dict.fromkeys(key.split()[1].partition("/")[2] for key in boxes))
    named = ", ".join(tensors[:NAMED]) + ", ..." * (len(tensors) > NAMED)
    ranks = ", ".join(f"rank {rank} on {copy.host}" for rank, copy in odd)
    of = f"{len(tensors)} tensor(s): {named}"
    if tied:
        return f"{ranks} should hold the same weights and do not ({of}); which of them is wrong can't be told."
    return f"{ranks}: its weights differ from those of the other {times} process(es) that hold the same ({of})."
