"""Interface of an engine whose parameters a push fills directly, and the recording of the copies
that the engine's loader makes.
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

Part = tuple[LogicalTensor, int]  # with the number of one of its HF tensors

log = logging.getLogger(__name__)


class Destinations(Protocol):
    """Access to an engine's parameters while its loader reads weights. Call the methods only from
    within the iterator of tensors that the loader reads; `watch` and `fill` apply until that load
    ends.
    """

    def bare(self) -> Mapping[str, Tensor]:
        """Returns the engine's parameters by name, on the meta device, for a load that is only
        recorded: the engine keeps its own weights whatever the loader writes to these parameters.
        """
        ...

    def watch(self, names: Collection[str], filled: Callable[[str, Tensor], None]) -> None:
        """Calls `filled(name, parameter)` for each parameter in `names` once the loader has written
        all of the parameter and before the engine repacks it.
        """
        ...

    def fill(self, name: str, filling: ReceivedFill) -> None:
        """Lets the engine fill the parameter `name` from `filling`, i.e. from received slices and
        this process's shards, instead of from tensors. The engine calls `filling.into` with the
        parameter: once on the meta device, to count its elements, and once with real memory, to
        copy the elements.
        """
        ...


def recorded(
    tensors: Sequence[LogicalTensor],
    trace_load: Callable[[Iterable[tuple[str, Tensor]]], None],
    destinations: Destinations,
) -> LoadRecorder:
    """Runs one load of `tensors` on the meta device and returns a LoadRecorder with the copies that
    the engine's loader made. `trace_load`: runs the loader on an iterator of (HF name, tensor);
    `destinations`: access to the parameters of the same engine.
    """
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
        reading.close()  # also if the loader stopped early
    recorder.forget()
    return recorder


class Recording:
    """Recording holds the copies of HF tensors into the engine's parameters that the engine's
    loader made in one traced load; a push replays them instead of running the loader. It also lists
    the tensors that must go through the loader, since the loader does more than copy them.

    A push uses the recording only after `prove` has compared the recorded copies with the result of
    a push that went through the loader.
    """

    def __init__(self, recorder: LoadRecorder, shards: LocalShards):
        self.proven = False
        self._recorder, self._shards = recorder, shards
        self._settle()

    @property
    def parameters(self) -> Collection[str]:
        """Returns the names of the parameters that recorded copies fill."""
        return self._copies.keys()

    def of_bucket(
        self, number: int, tensors: Sequence[LogicalTensor], receives: Mapping[int, Layout]
    ) -> tuple[list[Fill], list[Part]]:
        """Returns the copies into parameters (Fill) of bucket number `number`, and the HF tensors
        of the bucket that must go through the loader, as (LogicalTensor, index of the HF tensor in
        it). `tensors`: the bucket's tensors; `receives`: layout of the message from each source
        process.
        """
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
        """Marks the recording as proven after a complete push by the loader, whose result `proof`
        has compared with the recorded copies. Parameters that the copies do not reproduce are left
        to the loader.
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
