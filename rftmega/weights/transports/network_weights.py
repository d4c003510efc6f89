"""Weight sync to engines on any host: each trainer process sends the slices that it holds and a
worker reads, over a process group of the trainer and that engine's workers.

There is one group per engine: an engine that dies, hangs or is cut off breaks only its own group
and misses the push; the other engines get the weights.
"""

import hashlib
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.core.errors import EngineError, EngineFault
from rftmega.core.shards import Shard, volume
from rftmega.core.types import SliceChecksums
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.runtime.parallel.watchdog import mark
from rftmega.weights.message import Layout, message_for, sums_of, written
from rftmega.weights.needs import Needs, planned_moves, refuse_unread
from rftmega.weights.replay import message_order
from rftmega.weights.slice_sums import sum_of
from rftmega.weights.slices import TensorSlice, planned
from rftmega.weights.transports.remote_weights import (
    Asked,
    RemoteReceivers,
    RemoteWeights,
    WaitingEngine,
    begun,
)
from rftmega.weights.transports.transfer_group import (
    InFlight,
    Meeting,
    TransferGroup,
    visited,
    wait_all,
)
from rftmega.weights.transports.transfer_plan import (
    packed_needs,
    packed_plan,
    told_tensors,
    unpacked_needs,
)

PATIENCE = 10  # a worker's time limit, in multiples of the trainer's, which others may delay
IN_FLIGHT = 2  # buckets: one travels while the next is written
FAILED = b"failed"  # sent in place of needs
Result = TypeVar("Result")


class EnginePlan(NamedTuple):
    """EnginePlan holds the layouts of the messages that an engine's workers receive in a push, and
    their total size `bytes`; engines with equal needs share one EnginePlan.
    """

    sends: list[dict[int, Layout]]  # of this process, per bucket: rank in the group -> message
    told: list[bytes]  # packed plan of each worker
    bytes: int


class Link(NamedTuple):
    """Link is the connection to one engine: the process group and the plan of its messages."""

    group: TransferGroup
    plan: EnginePlan


class NetworkWeights(RemoteWeights):
    """NetworkWeights sends each engine worker only the slices that it reads."""

    def __init__(
        self,
        shards: Sequence[Shard],
        engines: RemoteReceivers,
        *,
        bucket_bytes: int,
        host: str,
        seconds: float,
    ):
        """`shards`: the trainer's shards of this process; `engines`: the remote engines;
        `bucket_bytes`: most bytes of the tensors that are sent together; `host`: address at which
        engines reach the first process; `seconds`: time limit of one message.
        """
        super().__init__(shards, engines, bucket_bytes=bucket_bytes)
        self.seconds, self.trainers = seconds, dist.get_world_size()
        self.reply_seconds = 2 * seconds
        self._meeting = Meeting(host, seconds=seconds) if self.rank == 0 else None
        port = self._first(lambda: self._meeting.port if self._meeting else 0)
        self.store: dist.Store
        if self._meeting is not None:
            self.store, self.host = self._meeting.store, host
        else:
            self.store, self.host = visited(host, port, seconds=seconds), _own_address(host, port)
        self._place = [host, port]
        self._shapes = {name: shape for name, _, shape in planned(self.tensors)}
        self._links: dict[str, Link] = {}
        self._plans: dict[bytes, EnginePlan] = {}
        self._joins = 0
        self._sent: list[tuple[int, Layout, Tensor]] = []  # target, message, checksums

    def checksums(self) -> list[SliceChecksums]:
        """Returns for every slice of the last push its checksums: of the trainer's weights now, as
        sent and as received; a collective. The policy's weights must be on the device.

        A worker refuses a slice whose checksum is not the one sent with it, so the received and
        sent checksums are equal.
        """
        self.shards.look_again()
        found = []
        for target, layout, sums in self._sent:
            for each, sent in zip(layout.slices, sums.tolist(), strict=True):
                held = sum_of(self.shards.slice_of(each))
                found.append(
                    SliceChecksums(each.name, each.box, self.rank, target, held, sent, sent)
                )
        return [each for theirs in gather_objects(found) for each in theirs]

    def close(self) -> None:
        self._forget(set(self._links))

    def _linked(self, waiting: Sequence[WaitingEngine]) -> list[str]:
        """Creates a link to each waiting engine that has none. Returns the names of the engines
        that can take a push.
        """
        new = [each for each in waiting if each.name not in self._links]
        groups = {}
        for each in new:
            self._joins += 1
            groups[each.name] = f"{self._joins}/{each.name}"
        joining: Asked = {}
        if self.rank == 0:
            for each in new:
                joining[each.name] = begun(self._join, each, groups[each.name])
        made: dict[str, Link] = {}
        for each in new:
            mark()
            with suppress(EngineFault):
                made[each.name] = self._made(each, groups[each.name])
        failed = {each.name for each in new} - made.keys()
        joined = set(self._those(joining))
        failed |= joining.keys() - joined
        unlinked = {name for names in gather_objects(failed) for name in names}
        for name in sorted(unlinked & joined):
            self.engines.miss(name, EngineFault(f"{name} and this run's processes did not meet."))
        for name, link in made.items():
            if name in unlinked:
                link.group.close()
            else:
                self._links[name] = link
        return [each.name for each in waiting if each.name in self._links]

    def _keep(self, names: set[str]) -> None:
        self._forget(self._links.keys() - names)

    def _forget_sums(self) -> None:
        self._sent.clear()  # those of late engines come to it

    def _brought(self, names: Sequence[str], version: int) -> tuple[int, Asked]:
        receiving = self._asked(names, self.engines.receive, {"version": version})
        return self._send(names, version), receiving

    def _least_bytes(self, landed: Sequence[str]) -> int:
        return sum(self._links[name].plan.bytes for name in landed)

    def _forget(self, names: set[str]) -> None:
        for name in names & self._links.keys():
            self._links.pop(name).group.close()

    def _join(self, engine: WaitingEngine, group: str) -> None:
        """Asks an engine's workers to join the process group `group`, and waits for the reply.
        Raises EngineError if they refuse.
        """
        told = {
            "meeting": self._place,
            "name": group,
            "trainers": self.trainers,
            "host": engine.host,
            "tensors": told_tensors(planned(self.tensors)),
            "seconds": PATIENCE * self.seconds,
        }
        try:
            self.engines.join(engine.name, told)
        except EngineError:
            for worker in range(engine.workers):  # the trainer need not wait for these
                self.store.compare_set(f"{group}/needs/{worker}", "", FAILED.decode())
            raise

    def _made(self, engine: WaitingEngine, name: str) -> Link:
        """Plans the messages to an engine's workers, and creates the process group `name` with
        them. Raises EngineFault if a worker does not join.
        """
        needs = []
        for worker in range(engine.workers):
            needs.append(self._needs_of(name, worker))
        plan = self._planned(needs)
        if self.rank == 0:
            for worker, told in enumerate(plan.told):
                self.store.set(f"{name}/plan/{worker}", told)  # type: ignore[arg-type]
        group = TransferGroup(
            self.store,
            name,
            rank=self.rank,
            size=self.trainers + engine.workers,
            device=self.shards.device,
            host=self.host,
            seconds=self.seconds,
        )
        return Link(group, plan)

    def _needs_of(self, name: str, worker: int) -> Needs:
        try:
            told = self.store.get(f"{name}/needs/{worker}")
        except dist.DistError as error:
            raise EngineFault(f"Worker {worker} of {name} said nothing: {error}") from error
        if told == FAILED:
            raise EngineFault(f"The workers of {name} did not come.")
        try:
            return unpacked_needs(told, self._shapes)
        except ValueError as error:
            raise EngineFault(
                f"Worker {worker} of {name} asks for what is not there: {error}"
            ) from error

    def _planned(self, needs: Sequence[Needs]) -> EnginePlan:
        """Returns the plan of the messages for the workers of one engine, computed identically on
        every process and cached. `needs`: for each worker, the blocks that it reads.
        """
        key = hashlib.sha256(b"".join(map(packed_needs, needs))).digest()
        if key not in self._plans:
            self._plans[key] = self._new_plan(needs)
        return self._plans[key]

    def _new_plan(self, needs: Sequence[Needs]) -> EnginePlan:
        refuse_unread(self.tensors, needs)
        kinds: list[Needs] = [{}, *needs]  # trainer processes need nothing
        kind_of = [0] * self.trainers + [1 + worker for worker in range(len(needs))]
        sends: list[dict[int, Layout]] = []
        receives: list[list[dict[int, list[TensorSlice]]]] = [[] for _ in needs]
        moved = 0
        for moves in planned_moves(self.buckets, kinds, kind_of):
            pairs: dict[tuple[int, int], list[TensorSlice]] = defaultdict(list)
            for source, target, part in moves:
                pairs[source, target].append(part)
                moved += part.bytes
            ordered = {pair: message_order(parts) for pair, parts in pairs.items()}
            sends.append(_layouts(ordered, self.rank))
            for worker, theirs in enumerate(receives):
                own = self.trainers + worker
                theirs.append({source: each for (source, to), each in ordered.items() if to == own})
        wanted = sum(map(self._bytes_of, needs))
        assert moved == wanted, f"planned to move {moved} of {wanted} bytes"
        told = [planned(bucket) for bucket in self.buckets]
        return EnginePlan(sends, [packed_plan(told, theirs) for theirs in receives], moved)

    def _bytes_of(self, needs: Needs) -> int:
        sizes = {name: dtype.itemsize for name, dtype, _ in planned(self.tensors)}
        return sum(sizes[name] * sum(map(volume, boxes)) for name, boxes in needs.items())

    @torch.no_grad()
    def _send(self, names: Sequence[str], version: int) -> int:
        """Sends this process's part of every bucket to the engines `names`. Returns the number of
        bytes that all processes sent.

        A link that breaks is closed, so that its workers do not wait for more messages.
        """
        self.buffer_bytes = sent = 0
        broken: set[str] = set()
        in_flight: deque[tuple[int, dict[str, list[InFlight]], list[Tensor]]] = deque()

        def settle() -> None:
            _, messages, _ = in_flight.popleft()
            for name, own in messages.items():
                if name not in broken:
                    self._over(name, broken, partial(wait_all, own))

        for number in range(len(self.buckets)):
            while len(in_flight) >= IN_FLIGHT:
                settle()
            mark()
            alike: dict[int, Tensor] = {}  # engines with equal needs get the same message
            sending: dict[str, list[InFlight]] = {}
            for name in names:
                group, plan = self._links[name]
                for target, layout in plan.sends[number].items():
                    if name in broken:
                        continue
                    if id(layout) not in alike:
                        alike[id(layout)] = self._written(target, layout, version)
                    message = alike[id(layout)]

                    work = self._over(name, broken, partial(group.send, message, target))
                    if work is not None:
                        sending.setdefault(name, []).append(work)
                        sent += layout.payload
            held = list(alike.values())
            in_flight.append((number, sending, held))
            at_once = sum(each.nbytes for _, _, kept in in_flight for each in kept)
            self.buffer_bytes = max(self.buffer_bytes, at_once)
        while in_flight:
            settle()
        total = torch.tensor(sent, device=self.shards.device)
        dist.all_reduce(total)
        return int(total)

    def _written(self, target: int, layout: Layout, version: int) -> Tensor:
        slices = self.shards.slices_of(layout.slices)
        message = written(message_for(layout, self.shards.device), layout, version, slices)
        self._sent.append((target, layout, sums_of(message, layout)))
        return message

    def _over(self, name: str, broken: set[str], work: Callable[[], Result]) -> Result | None:
        """Runs `work`, which sends over the link to engine `name`. If the connection breaks, closes
        the link, adds the engine to `broken` and returns None.
        """
        try:
            return work()
        except EngineFault:
            broken.add(name)
            self._links[name].group.close()
            return None


def _layouts(ordered: dict[tuple[int, int], list[TensorSlice]], source: int) -> dict[int, Layout]:
    """Returns the layouts of the messages that process `source` sends, by target process; targets
    with equal slices share a layout. `ordered`: slices by (source, target), in the order of the
    message.
    """
    alike: dict[Any, Layout] = {}
    found = {}
    for (sender, target), parts in ordered.items():
        if sender == source:
            found[target] = alike.setdefault(tuple(parts), Layout(parts))
    return found


def _own_address(host: str, port: int) -> str:
    """Returns the IP address of this host on the network route to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as to:
        to.connect((host, port))  # sends nothing
        return str(to.getsockname()[0])
