"""RemoteWeights is what all ways share that bring weights to engines which may miss a push."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from rftmega.core.errors import EngineError, EngineFault
from rftmega.core.shards import Shard
from rftmega.core.types import Metrics, SliceChecksums
from rftmega.runtime.parallel.watchdog import mark
from rftmega.weights.slices import LocalShards, buckets_of, everybodys_tensors

Result = TypeVar("Result")


class WaitingEngine(NamedTuple):
    """WaitingEngine is an engine that waits for weights."""

    name: str  # another one after each start
    workers: int
    host: str  # address at which its workers are reached
    holds: bool = False  # the weights, which are frozen: a push has something else for it


class RemoteReceivers(Protocol):
    """The engines, as far as a push knows them.

    Only the first process's are asked to do anything.
    """

    version: int | None
    newest: int

    def waiting(self) -> list[WaitingEngine]:
        """Starts and finds engines; those that it returns generate nothing until they land."""
        ...

    def join(self, name: str, init_info: dict[str, Any]) -> None: ...

    def receive(self, name: str, update_info: dict[str, Any]) -> None: ...

    def land(self, name: str, version: int) -> None: ...

    def late(self) -> list[WaitingEngine]:
        """Returns, of those that waiting() would, the engines that have not got the last push."""
        ...

    def pushed(self) -> None:
        """Notes that a push has ended, whatever came of it."""
        ...

    def miss(self, name: str, error: EngineError) -> None:
        """Notes that an engine has no weights of the push."""
        ...

    def invalidate(self) -> None: ...

    def measures(self) -> Metrics:
        """Returns how the engines are."""
        ...


Asked = dict[str, "Future[None]"]  # engine -> its answer; empty but on the first process


class RemoteWeights(ABC):
    """RemoteWeights is a WeightSync whose engines take a push each for itself. Every process
    constructs it, and calls it, alike.
    """

    def __init__(self, shards: Sequence[Shard], engines: RemoteReceivers, *, bucket_bytes: int):
        self.engines = engines
        self.shards = LocalShards(shards)
        self.tensors = everybodys_tensors(shards)
        self.buckets = buckets_of(self.tensors, bucket_bytes, for_an_engine=True)
        self.rank = dist.get_rank()
        self.reply_seconds = 600.0  # after the last byte was sent
        self.buffer_bytes = 0  # of messages that this process held at once in the last push

    def push(self, *, version: int) -> Metrics:
        """Does what `_push` does; engines neither come nor go meanwhile."""
        try:
            return self._push(version)
        finally:
            self.engines.pushed()

    def _push(self, version: int) -> Metrics:
        """Afterwards every engine that has the weights answers under `version`; those that missed
        them are told to the engines' owner, and answer nothing.

        Raises EngineFault on every process where none has them.
        """
        begin = time.perf_counter()
        self.engines.invalidate()
        self.shards.look_again()
        waiting = self._first(self.engines.waiting)
        self._keep({each.name for each in waiting})
        if not all(each.holds for each in waiting):
            self._forget_sums()
        names, landed, moved = self._given(waiting, version)
        if not landed:
            raise EngineFault(
                f"No server has the weights of push {version}; {len(names)} waited for them."
            )
        self.engines.version = version
        took = [name for name in landed if name not in _holders(waiting)]
        least = self._least_bytes(took) if took else 0
        return {
            "push_seconds": time.perf_counter() - begin,
            "push_bytes": float(moved),
            "push_bytes_least": float(least),
            "push_ratio": moved / least if least else 1.0,
            "push_buffer_bytes": float(self.buffer_bytes),
            "push_missed": float(len(names) - len(landed)),
        } | self._first(self.engines.measures)

    def push_to_late(self) -> int:
        """Brings the weights of the last push to engines that have come since, while the others
        answer; returns how many have them now.

        The trainer's weights must still be those: it is called before they change.
        """
        try:
            late = self._first(self.engines.late)
            if not late:
                return 0
            self.shards.look_again()
            _, landed, _ = self._given(late, self.engines.newest)
            return len(landed)
        finally:
            self.engines.pushed()

    def _given(
        self, waiting: Sequence[WaitingEngine], version: int
    ) -> tuple[list[str], list[str], int]:
        """Gives engines a push. Returns those that could take it, those that have it, and the bytes
        that were moved.
        """
        holders = _holders(waiting)
        names = self._linked([each for each in waiting if not each.holds])
        moved, receiving = self._brought(names, version) if names else (0, {})
        self.engines.newest = version
        landed = self._landed(receiving, holders, version)
        self._forget(set(names) - set(landed))
        return [*names, *holders], landed, moved

    @abstractmethod
    def checksums(self) -> list[SliceChecksums]: ...

    @abstractmethod
    def _linked(self, waiting: Sequence[WaitingEngine]) -> list[str]:
        """Prepares these engines. Returns those of them that can take a push."""

    @abstractmethod
    def _keep(self, names: set[str]) -> None:
        """Forgets all engines but these."""

    def _forget_sums(self) -> None:  # noqa: B027  files have one of each slice
        """Forgets the checksums of the push before."""

    @abstractmethod
    def _brought(self, names: Sequence[str], version: int) -> tuple[int, Asked]:
        """Sends a push. Returns the bytes that all processes sent, and what engines answer."""

    @abstractmethod
    def _least_bytes(self, landed: Sequence[str]) -> int:
        """Returns the bytes that had to be moved for these engines."""

    @abstractmethod
    def _forget(self, names: set[str]) -> None:
        """Forgets engines, which must be prepared again before they can take a push."""

    def _asked(
        self,
        names: Sequence[str],
        work: Callable[..., None],
        *arguments: Any,
    ) -> Asked:
        """Begins to ask each engine, on the first process."""
        if self.rank:
            return {}
        return {name: begun(work, name, *arguments) for name in names}

    def _those(self, asked: Asked) -> list[str]:
        """Returns the engines that did what they were asked; the others are told of."""
        found = []
        end = time.monotonic() + self.reply_seconds
        for name, completion in asked.items():
            mark()
            try:
                completion.result(max(0.0, end - time.monotonic()))
            except TimeoutError:
                late = (
                    f"{name} did not say within {self.reply_seconds:g} s that it has the weights."
                )
                self.engines.miss(name, EngineFault(late))
            except EngineError as error:
                self.engines.miss(name, error)
            else:
                found.append(name)
        return found

    def _landed(self, receiving: Asked, holders: Sequence[str], version: int) -> list[str]:
        """Returns the engines that have the weights and answer."""

        def landed() -> list[str]:
            whole = [*holders, *self._those(receiving)]
            return self._those(self._asked(whole, self.engines.land, version))

        return self._first(landed)

    def _first(self, work: Callable[[], Result]) -> Result:
        """Returns on every process what `work` gives on the first one.

        Raises EngineError on all where it does there.
        """
        told: list[Any] = [None, None]
        failure: EngineError | None = None
        if self.rank == 0:
            try:
                told[0] = work()
            except EngineError as error:
                failure = error
                told[1] = str(error)
        dist.broadcast_object_list(told)
        if failure is not None:
            raise failure
        if told[1] is not None:
            raise EngineFault(f"{told[1]} (on the first process)")
        result: Result = told[0]
        return result


def _holders(waiting: Sequence[WaitingEngine]) -> list[str]:
    return [each.name for each in waiting if each.holds]


def begun(work: Callable[..., None], *arguments: Any) -> "Future[None]":
    """Begins `work` in a thread that nobody waits for at the end of the program: the other side may
    be cut off, and never answer.
    """
    completion: Future[None] = Future()

    def run() -> None:
        try:
            work(*arguments)
        except BaseException as error:
            completion.set_exception(error)
        else:
            completion.set_result(None)

    Thread(target=run, name="push", daemon=True).start()
    return completion
