"""Defines what a push needs of an engine whose parameters it fills itself, and records what it
knows of them.
"""

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from rftmega.core.shards import LogicalTensor
from rftmega.weights.message import Layout
from rftmega.weights.recording import LoadRecorder
from rftmega.weights.replay import Fill, Proof, ReceivedFill, by_name, fills_of
from rftmega.weights.slices import LocalShards, planned

Part = tuple[LogicalTensor, int]  # and the number of one of its HF tensors

log = logging.getLogger(__name__)


class Destinations(Protocol):
    """An engine's parameters while its loader reads: ask from within the iterator that it reads
    from. What is asked holds until the load is over.
    """

    def bare(self) -> Mapping[str, Tensor]:
        """Returns all parameters, on the meta device.

        Whatever the loader does to them, the engine keeps its weights.
        """
        ...

    def watch(self, names: Collection[str], filled: Callable[[str, Tensor], None]) -> None:
        """Calls `filled` with each of these parameters once the loader has done all it does to it,
        before it is repacked.
        """
        ...

    def fill(self, name: str, filling: ReceivedFill) -> None:
        """Has `filling.into` called with the parameter, once on the meta device, for what it
        counts, and once for good.
        """
        ...


def recorded(
    tensors: Sequence[LogicalTensor],
    trace_load: Callable[[Iterable[tuple[str, Tensor]]], None],
    destinations: Destinations,
) -> LoadRecorder:
    """Records what the engine's loader does with these tensors."""
    recorder = LoadRecorder()
    named = [(name, recorder.tensor(name, dtype, shape)) for name, dtype, shape in planned(tensors)]

    def recording() -> Generator[tuple[str, Tensor]]:
        recorder.parameters(destinations.bare())
        with recorder:
            yield from named

    reading = recording()
    try:
        trace_load(reading)
    finally:
        reading.close()  # also where the loader stopped in the middle
    recorder.forget()
    return recorder


class Recording:
    """Recording knows which copies bring a bucket's tensors to the engine's parameters, and which
    tensors its loader must take.

    Until a push by the loader itself was compared with it (`prove`) it is only believed to be
    whole.
    """

    def __init__(self, recorder: LoadRecorder, shards: LocalShards):
        self.proven = False
        self._recorder, self._shards = recorder, shards
        self._settle()

    @property
    def parameters(self) -> Collection[str]:
        """Returns the names of the parameters that copies fill."""
        return self._copies.keys()

    def of_bucket(
        self, number: int, tensors: Sequence[LogicalTensor], receives: Mapping[int, Layout]
    ) -> tuple[list[Fill], list[Part]]:
        """Returns the fills of bucket `number`, and the HF tensors of it that the loader takes."""
        if number not in self._fills:
            by_loader = [
                (tensor, number)
                for tensor in tensors
                for number, name in enumerate(tensor.names)
                if name in self._by_loader
            ]
            self._fills[number] = (
                fills_of(tensors, receives, self._of_name, self._shards),
                by_loader,
            )
        return self._fills[number]

    def prove(self, proof: Proof) -> None:
        """Marks the recording as proven after a whole push by the loader: it keeps what it does
        besides copying.
        """
        if refuted := proof.refuted():
            log.warning(
                "The engine's loader does more than copy to %s: it takes their weights itself.",
                sorted(refuted),
            )
            self._recorder.changed |= refuted
            self._settle()
        self.proven = True

    def _settle(self) -> None:
        self._copies = self._recorder.plain()
        self._of_name = by_name(self._copies)
        self._by_loader = {
            name for name, boxes in self._recorder.asked.items() if boxes
        } - self._of_name.keys()
        self._fills: dict[int, tuple[list[Fill], list[Part]]] = {}
