"""WeightSync: what the engine of this process needs of the policy's weights, and nothing else, into it.

At the start the engine's own loader is handed tensors that only record what is asked for; from that and from who holds what,
every process computes the same plan. A push then moves each planned slice once, checks it, and lets the loader copy from the
slices that came and from the trainer's own shard.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from converters import Segment
from rftmega.device.spans import span
from rftmega.errors import EngineError, EngineFault
from rftmega.parallel.collectives import gather_objects
from rftmega.parallel.progress import mark
from rftmega.types import Metrics, SliceChecksums
from rftmega.weights.message import checksums_of, message_for, opened, sums_of, written
from rftmega.weights.on_demand import Box, Fetch, OnDemand
from rftmega.weights.plan import Balance, Placement
from rftmega.weights.slice_sums import SliceSums
from rftmega.weights.units import Held, Move, Piece, Shards, Unit, buckets_of, units_of

Needs = dict[str, list[tuple[int, int]]]  # HF name -> rows (columns, by the rule's axis) that an engine reads, from and to


class Loader(Protocol):
    """An engine, as far as a push knows it."""

    def rehearse(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None: ...

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None: ...

    def distrust(self) -> None: ...


class Bucket(NamedTuple):
    """Units that are loaded one after the other, and what travels for them; sender and receiver have it in the same order."""

    units: list[Unit]
    sends: dict[int, list[Move]]  # by target
    receives: dict[int, list[Move]]  # by source


class EngineWeights:
    """Brings new weights into all engines. Every process constructs it, and calls it, alike."""

    def __init__(self, held: Sequence[Held], engine: Loader, *, bucket_bytes: int):
        """Rehearses the load and plans it, a collective over all processes; the engine's weights are lost.

        Raises EngineError for a tensor that no engine reads: the policy's idea of the model would not be the engine's.
        """
        self.engine = engine
        self.shards = Shards(held)
        units = units_of(held)
        self.needs = self._rehearse(units)
        kinds, kind_of = _everybodys(self.needs)
        _refuse_unread(units, kinds)
        self.buckets = _plan(buckets_of(units, bucket_bytes, for_an_engine=True), kinds, kind_of)
        missing = torch.tensor(sum(map(self._missing_bytes, units)), device=self.shards.device)
        dist.all_reduce(missing)
        self.least_bytes = int(missing)
        self.buffer_bytes = 0  # of messages that this process held at once in the last push, at most
        self._sums = SliceSums()  # of the last push

    def checksums(self) -> list[SliceChecksums]:
        """Of every slice of the last push; a collective, with the policy's weights on the device."""
        return self._sums.compared(self.shards)

    def push(self, *, version: int) -> Metrics:
        """Afterwards every engine answers under `version`. If anything fails anywhere, none answers until a push was whole.

        Raises what this process's engine raised, or EngineError; a push that failed on a living process may be repeated. What
        else fails in moving the weights (no memory for a message) is raised as it is, and that process can't go on.
        """
        begin = time.perf_counter()
        self.engine.distrust()
        try:
            moved = self._push(version)
        except BaseException:
            self.engine.distrust()  # it may have taken everything where another's did not
            raise
        return {
            "push_seconds": time.perf_counter() - begin,
            "push_bytes": float(moved),
            "push_bytes_least": float(self.least_bytes),
            "push_ratio": moved / self.least_bytes if self.least_bytes else 1.0,
            "push_buffer_bytes": float(self.buffer_bytes),
        }

    def _push(self, version: int) -> int:
        """Bytes that all processes sent."""
        failure: Exception | None = None
        try:
            self._sums = SliceSums()
            passage = _Passage(self, version, self._sums)
            try:
                self.engine.load_weights(passage.tensors(), version=version)
                if not passage.over:
                    failure = EngineError("The engine stopped reading before the last tensor of the push.")
            except Exception as error:
                failure = error
            self.buffer_bytes = passage.buffer_bytes
            passage.drain()  # others wait for what this process sends
            total = torch.tensor([int(failure is not None), passage.sent_bytes], device=self.shards.device)
            dist.all_reduce(total)
        except RuntimeError as raised:
            if not _is_of_a_connection(raised):
                raise
            raise EngineFault(f"Push {version} broke off: a process is gone ({raised}).") from failure
        failed, moved = total.tolist()
        if failure is not None:
            raise failure
        if failed:
            raise EngineFault(f"Push {version} failed on {failed} other process(es); no engine has weights now.")
        return int(moved)

    def _rehearse(self, units: Sequence[Unit]) -> Needs:
        asked: Needs = defaultdict(list)

        def recorder(name: str, axis: int) -> Fetch:
            def fetch(box: Box, out: Tensor) -> None:
                asked[name].append(box[axis])
                out.zero_()

            return fetch

        self.engine.rehearse(
            (name, OnDemand.of(shape, dtype, recorder(name, unit.rule.axis), self.shards.device))
            for unit in units
            for name, dtype, shape in unit.planned
        )
        return {name: _merged(ranges) for name, ranges in asked.items()}

    def _missing_bytes(self, unit: Unit) -> int:
        """Of a unit: what this process's engine reads and this process does not hold."""
        missing = 0
        for part, (name, dtype, shape) in enumerate(unit.planned):
            row = torch.Size(shape).numel() // shape[unit.rule.axis] * dtype.itemsize
            here = self.shards.pieces(unit, part)
            for start, stop in self.needs.get(name, []):
                present = sum(max(0, min(stop, piece.stop) - max(start, piece.start)) for piece in here)
                missing += (stop - start - present) * row
        return missing


class _Passage:
    """One push under way, as one process sees it."""

    def __init__(self, weights: EngineWeights, version: int, sums: SliceSums):
        self.weights = weights
        self.version = version
        self.sums = sums
        self.sent_bytes = 0
        self.over = False  # the last tensor was taken
        self.buffer_bytes = 0  # of messages that were there at once, at most
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self._left = iter(weights.buckets)
        self._travelling = self._post()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor on demand) of the whole model. Raises EngineError where what came is not what was sent."""
        while self._travelling is not None:
            yield from self._opened(*self._arrive())
        self.over = True

    def _opened(self, bucket: Bucket, came: dict[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """A bucket's tensors. Its messages go with this generator, before the bucket after the next one sets out."""
        arrived: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        for source, message in came.items():
            for move, elements in opened(message, bucket.receives[source], self.version, source):
                arrived[id(move.unit), move.part].append(Piece(move.start, move.stop, elements))
        for unit in bucket.units:
            for part, (name, dtype, shape) in enumerate(unit.planned):
                own = self.weights.shards.pieces(unit, part)
                self._record(unit, part, own)
                pieces = own + arrived[id(unit), part]
                yield name, OnDemand.of(shape, dtype, _reader(name, unit.rule.axis, pieces), self.weights.shards.device)
        for source, message in came.items():  # after the loader has read it: nothing may have changed it since it came
            self.sums.received(source, bucket.receives[source], checksums_of(message, bucket.receives[source]))

    def _record(self, unit: Unit, part: int, own: Sequence[Piece]) -> None:
        """What the engine reads of this process's own shard."""
        needed = self.weights.needs.get(unit.planned[part].name, [])
        for piece in own:
            for start, stop in needed:
                first, last = max(start, piece.start), min(stop, piece.stop)
                if first < last:
                    rows = piece.elements.narrow(unit.rule.axis, first - piece.start, last - first)
                    self.sums.used(unit, part, first, rows)

    def drain(self) -> None:
        """Takes part in what is left, for the others' sake."""
        while self._travelling is not None:
            self._arrive()

    def _post(self) -> tuple[Bucket, dict[int, Tensor], list[Any], list[Tensor]] | None:
        """Starts a bucket on its way."""
        bucket = next(self._left, None)
        if bucket is None:
            return None
        device = self.weights.shards.device
        alike: dict[Any, Tensor] = {}  # processes that need the same get the same message
        sent = {}
        for target, moves in bucket.sends.items():
            key = tuple((id(move.unit), *move[1:]) for move in moves)
            if key not in alike:
                alike[key] = written(message_for(moves, device), moves, self.version, self.weights.shards.slice_of)
            sent[target] = alike[key]
            self.sums.sent(target, moves, sums_of(alike[key], moves))
        came = {source: message_for(moves, device) for source, moves in bucket.receives.items()}
        self.sent_bytes += sum(move.bytes for moves in bucket.sends.values() for move in moves)
        self._count([*alike.values(), *came.values()])
        operations = [dist.P2POp(dist.isend, message, target) for target, message in sent.items()]
        operations += [dist.P2POp(dist.irecv, message, source) for source, message in came.items()]
        return bucket, came, dist.batch_isend_irecv(operations) if operations else [], list(sent.values())

    def _count(self, messages: Sequence[Tensor]) -> None:
        """New messages, beside those that somebody still reads."""
        self._alive = [(storage, size) for storage, size in self._alive if not storage.expired()]
        self._alive += [(StorageWeakRef(message.untyped_storage()), message.nbytes) for message in messages]
        self.buffer_bytes = max(self.buffer_bytes, sum(size for _, size in self._alive))

    def _arrive(self) -> tuple[Bucket, dict[int, Tensor]]:
        """Waits for the bucket on its way, once the next one has set out: it travels while this one is loaded."""
        mark()
        assert self._travelling is not None
        bucket, came, works, _ = self._travelling
        self._travelling = self._post()
        with span("receive weights"):
            for work in works:
                work.wait()
        return bucket, came


def _is_of_a_connection(error: RuntimeError) -> bool:
    """NCCL's and the store's errors have classes of their own; gloo's are RuntimeErrors that name a source file of its."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _everybodys(needs: Needs) -> tuple[list[Needs], list[int]]:
    """(what ranks of engines need, which of these each process needs): engines are alike, so there are few, each told once."""
    said = sorted(needs.items())
    digests = gather_objects(hashlib.sha256(repr(said).encode()).digest())
    first = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    kinds = []
    for rank in sorted(first.values()):
        told: list[Any] = [needs]
        dist.broadcast_object_list(told, rank)
        kinds.append(told[0])
    order = {digests[rank]: number for number, rank in enumerate(sorted(first.values()))}
    return kinds, [order[digest] for digest in digests]


def _plan(buckets: Sequence[list[Unit]], kinds: Sequence[Needs], kind_of: Sequence[int]) -> list[Bucket]:
    """The same on every process; each keeps what it takes part in."""
    me = dist.get_rank()
    planned = []
    for units, moves in zip(buckets, planned_moves(buckets, kinds, kind_of), strict=True):
        bucket = Bucket(units, defaultdict(list), defaultdict(list))
        for source, target, move, _ in moves:
            if source == me:
                bucket.sends[target].append(move)
            if target == me:
                bucket.receives[source].append(move)
        planned.append(bucket)
    return planned


def planned_moves(
    buckets: Sequence[list[Unit]], kinds: Sequence[Needs], kind_of: Sequence[int]
) -> Iterator[Iterator[tuple[int, int, Move, int]]]:
    """(source, target, what moves, bytes) of each bucket, to be read one after the other: who sends depends on who sent before.

    `kinds`: what ranks of engines need; `kind_of`: which of them each process needs. Layers that are alike are cut once.
    """
    balance: dict[torch.dtype, Balance] = {}
    shared: dict[Any, tuple[tuple[int, tuple[Segment, ...]], ...]] = {}

    def moves(units: list[Unit]) -> Iterator[tuple[int, int, Move, int]]:
        for unit in units:
            names = unit.rule.hf_names(unit.layer, unit.expert)
            of_kind = tuple(
                tuple(Segment(part, *range_) for part, name in enumerate(names) for range_ in needed.get(name, []))
                for needed in kinds
            )
            if of_kind not in shared:
                shared[of_kind] = tuple((rank, of_kind[kind]) for rank, kind in enumerate(kind_of))
            plan = balance.setdefault(unit.dtype, Balance(unit.dtype.itemsize))
            for source, target, part, start, stop, size in plan.transfers(Placement(unit.rule, unit.holders, shared[of_kind])):
                yield source, target, Move(unit, part, start, stop), size

    return map(moves, buckets)


def _refuse_unread(units: Sequence[Unit], kinds: Sequence[Needs]) -> None:
    """Every element must be read by some engine's rank."""
    for unit in units:
        for name, _, shape in unit.planned:
            read = _merged([range_ for needs in kinds for range_ in needs.get(name, [])])
            if read != [(0, shape[unit.rule.axis])]:
                raise EngineError(f"No engine reads all of {name} {tuple(shape)}, which the policy has: only {read} of it.")


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same rows in the fewest ranges."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(range_ for range_ in ranges if range_[0] < range_[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _reader(name: str, axis: int, pieces: Sequence[Piece]) -> Fetch:
    """Elements of a box, from the pieces of the tensor that are here."""

    def fetch(box: Box, out: Tensor) -> None:
        start, stop = box[axis]
        at = start
        for piece in sorted(pieces, key=lambda piece: piece.start):
            end = min(piece.stop, stop)
            if piece.start > at or end <= at:
                continue
            elements = piece.elements.narrow(axis, at - piece.start, end - at)
            for dim, (low, high) in enumerate(box):
                if dim != axis:
                    elements = elements.narrow(dim, low, high - low)
            out.narrow(axis, at - start, end - at).copy_(elements)
            at = end
        if at < stop:
            raise EngineError(f"The engine asks for {name}[{start}:{stop}]; it did not when the push was planned.")

    return fetch
