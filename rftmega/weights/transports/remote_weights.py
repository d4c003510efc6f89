"""Base class of the weight transports to remote engines, each of which may miss a push without
failing it for the others.
"""

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
    """WaitingEngine is an engine that waits for weights: its name, its number of workers, its
    address, and whether it already holds the frozen base model.
    """

    name: str  # a new one after each start
    workers: int
    host: str  # address at which its workers are reached
    holds: bool = False  # the frozen weights already: a push has only adapters for it


class RemoteReceivers(Protocol):
    """RemoteReceivers is the part of the remote engines' interface that a push uses: `join`
    prepares an engine, `receive` tells it to take the weights, `land` makes it generate with them.

    Its methods are called only on the first process.
    """

    version: int | None
    newest: int

    def waiting(self) -> list[WaitingEngine]:
        """Starts servers if needed, and returns the engines that wait for weights. These engines
        generate nothing until `land` is called for them.
        """
        ...

    def join(self, name: str, init_info: dict[str, Any]) -> None: ...

    def receive(self, name: str, update_info: dict[str, Any]) -> None: ...

    def land(self, name: str, version: int) -> None: ...

    def late(self) -> list[WaitingEngine]:
        """Returns the waiting engines that do not have the weights of the last push."""
        ...

    def pushed(self) -> None:
        """Records that a push has ended, successfully or not."""
        ...

    def miss(self, name: str, error: EngineError) -> None:
        """Records that engine `name` did not get the weights of the push because of `error`."""
        ...

    def invalidate(self) -> None: ...

    def measures(self) -> Metrics:
        """Returns metrics of the engines, e.g. the number of healthy servers."""
        ...


Asked = dict[str, "Future[None]"]  # engine -> its reply; empty except on the first process


class RemoteWeights(ABC):
    """RemoteWeights is a WeightSync whose engines take a push independently of each other: an
    engine that fails misses the push, and the others get it. All processes must construct it and
    call its methods in the same order.
    """

    def __init__(self, shards: Sequence[Shard], engines: RemoteReceivers, *, bucket_bytes: int):
        self.engines = engines
        self.shards = LocalShards(shards)
        self.tensors = everybodys_tensors(shards)
        self.buckets = buckets_of(self.tensors, bucket_bytes, for_an_engine=True)
        self.rank = dist.get_rank()
        self.reply_seconds = 600.0  # limit for replies after the last byte was sent
        self.buffer_bytes = 0  # peak size of the messages that this process held in the last push

    def push(self, *, version: int) -> Metrics:
        """Sends the trainer's current weights to the waiting engines, as weight version `version`,
        and returns metrics of the push; see `_push`. Engines neither join nor leave during a push.
        """
        try:
            return self._push(version)
        finally:
            self.engines.pushed()

    def _push(self, version: int) -> Metrics:
        """Sends the trainer's current weights to the waiting engines, as weight version `version`.
        Engines that missed the weights are reported (`RemoteReceivers.miss`) and generate nothing.

        Raises EngineFault on every process if no engine has the weights.
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
        """Sends the last push's weights to engines that have joined since then, while the other
        engines generate. Returns the number of joined engines that now have the weights.

        Call it before the trainer's weights change.
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
        """Sends the weights of push `version` to the waiting engines. Returns the names of the
        engines that should have received them, the names of the engines that now have them, and the
        number of bytes sent.
        """
        holders = _holders(waiting)
        lacking = [each for each in waiting if not each.holds]
        names = self._linked(lacking)
        moved, receiving = self._brought(names, version) if names else (0, {})
        self.engines.newest = version
        landed = self._landed(receiving, holders, version)
        self._forget(set(names) - set(landed))
        return [*(each.name for each in lacking), *holders], landed, moved

    @abstractmethod
    def checksums(self) -> list[SliceChecksums]: ...

    @abstractmethod
    def _linked(self, waiting: Sequence[WaitingEngine]) -> list[str]:
        """Prepares the waiting engines for a push. Returns the names of the engines that can take a
        push.
        """

    @abstractmethod
    def _keep(self, names: set[str]) -> None:
        """Releases this transport's resources (e.g. connections) for all engines whose names are
        not in `names`.
        """

    def _forget_sums(self) -> None:  # noqa: B027  files have one of each slice
        """Forgets the checksums of the previous push."""

    @abstractmethod
    def _brought(self, names: Sequence[str], version: int) -> tuple[int, Asked]:
        """Sends the weights of push `version` to the engines `names`. Returns the number of bytes
        that all processes sent, and the engines' pending replies.
        """

    @abstractmethod
    def _least_bytes(self, landed: Sequence[str]) -> int:
        """Returns the smallest number of bytes that must be sent to give the engines in `landed`
        the weights.
        """

    @abstractmethod
    def _forget(self, names: set[str]) -> None:
        """Releases this transport's resources (e.g. connections) for the engines in `names`, which
        must be prepared again before they can take a push.
        """

    def _asked(
        self,
        names: Sequence[str],
        work: Callable[..., None],
        *arguments: Any,
    ) -> Asked:
        """Starts `work(name, *arguments)` in a thread for each engine. Returns the pending replies
        by engine name; {} except on the first process.
        """
        if self.rank:
            return {}
        return {name: begun(work, name, *arguments) for name in names}

    def _those(self, asked: Asked) -> list[str]:
        """Waits for the pending replies `asked`, and returns the names of the engines that
        completed their request. Reports every other engine as having missed the push.
        """
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
        """Returns, on every process, the names of the engines that have the weights and serve
        requests. `receiving`: pending replies of the engines being sent weights; `holders`: engines
        that had the weights before.
        """

        def landed() -> list[str]:
            whole = [*holders, *self._those(receiving)]
            return self._those(self._asked(whole, self.engines.land, version))

        return self._first(landed)

    def _first(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the first process and returns its result on every process.

        Raises EngineError on all processes if `work` raises an EngineError on the first.
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
    """Starts `work` in a daemon thread, which the program does not wait for at exit: the remote
    engine may be cut off and never reply. Returns a Future that holds the error of `work`, or None
    when it ends.
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
