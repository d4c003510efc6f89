"""Servers' workers that fail while weights come: the others have them, and the next push is whole.

Workers are those that run inside vLLM's servers, in threads of the first process, with a dictionary
in the place of a model.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.config import ParallelConfig
from rftmega.core.errors import EngineError, EngineFault
from rftmega.runtime.parallel.process_group import World
from rftmega.weights import Exporter
from rftmega.weights.transports import disk_weights
from rftmega.weights.transports.disk_weights import DiskWeights
from rftmega.weights.transports.network_weights import NetworkWeights
from rftmega.weights.transports.remote_weights import WaitingEngine
from tests.layouts import build_actor
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

SECONDS = 1.5  # that a message may take


class Model:
    """Model keeps what it is given."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            out = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.tensors[name] = out.copy_(tensor)

    def named_modules(self) -> list[Any]:
        return []


def worker_of(transport: str) -> Any:
    from rftmega.weights.receivers.disk_transfer import DiskWeightTransferEngine
    from rftmega.weights.receivers.network_transfer import NetworkWeightTransferEngine

    kind = {"network": NetworkWeightTransferEngine, "disk": DiskWeightTransferEngine}[transport]

    class Worker(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.model, self.device = Model(), torch.device("cpu")
            self.parallel_config = SimpleNamespace(rank=0, world_size=1)
            self.model_config = SimpleNamespace(hf_config=None)

        def start_weight_update(self) -> None:
            self._missing = set(self._expected)

        def finish_weight_update(self) -> None: ...

    return Worker()


class Engines:
    """Engines are workers by name; `fault` is done to the second where it fits."""

    def __init__(self, transport: str, fault: str, *, first: bool):
        self.version: int | None = None
        self.newest, self.fault = -1, fault
        self.workers = {name: worker_of(transport) for name in ("a", "b")} if first else {}
        self.there = ["a"] if fault == "comes late" else ["a", "b"]
        self.landed: list[tuple[str, int]] = []
        self.missed: dict[str, str] = {}

    def waiting(self) -> list[WaitingEngine]:
        return [WaitingEngine(name, 1, "127.0.0.1") for name in self.there]

    def late(self) -> list[WaitingEngine]:
        raise AssertionError("nobody asks for it")

    def pushed(self) -> None: ...

    def invalidate(self) -> None:
        self.version = None

    def join(self, name: str, init_info: dict[str, Any]) -> None:
        if name == "b" and self.fault == "refuses to join":
            raise EngineError("no")
        if name == "b" and self.fault == "does not come":
            hangs()
        worker = self.workers[name]
        worker.init_transfer_engine(worker.init_info_cls(**init_info))

    def receive(self, name: str, update_info: dict[str, Any]) -> None:
        worker, real = self.workers[name], None
        if name == "b" and self.fault in FAULTS_OF_A_BUCKET:
            real = worker.load
            worker.load = lambda named: FAULTS_OF_A_BUCKET[self.fault](worker, real, named)
        if name == "b" and self.fault == "expects another push":
            update_info = update_info | {"version": 17}
        if name == "b" and self.fault == "gets a damaged slice":
            real = worker._posted
            worker._posted = lambda number: damaged(*real(number))
        try:
            worker.start_weight_update()
            worker.receive_weights(worker.update_info_cls(**update_info))
        finally:
            if real is not None:
                del worker.__dict__[real.__name__]
            if name == "b":
                WENT_ON.set()

    def land(self, name: str, version: int) -> None:
        self.landed.append((name, version))

    def measures(self) -> dict[str, float]:
        return {"servers_healthy": 2.0 - len(self.missed)}

    def miss(self, name: str, error: EngineError) -> None:
        self.missed[name] = str(error)


class Damaging:
    """Damaging is a message that is changed on its way."""

    def __init__(self, in_flight: Any, message: Tensor):
        self.in_flight, self.message = in_flight, message

    def wait(self) -> None:
        self.in_flight.wait()
        self.message[-1] ^= 1


def damaged(messages: dict[int, Tensor], in_flight: list[Any]) -> Any:
    pairs = zip(in_flight, messages.values(), strict=True)
    return messages, [Damaging(each, message) for each, message in pairs]


def dies(worker: Any, load: Callable[..., None], named: Any) -> None:
    worker.shutdown()
    raise EngineFault("it died")


GOES_ON, WENT_ON = threading.Event(), threading.Event()  # what hangs; what took a push


def hangs(*_: Any) -> None:
    """Hangs until it is too late for anybody."""
    GOES_ON.wait()
    raise EngineFault("it is too late for anybody")


def slow(worker: Any, load: Callable[..., None], named: Any) -> None:
    time.sleep(0.05)
    load(named)


FAULTS_OF_A_BUCKET = {"dies in a bucket": dies, "hangs in a bucket": hangs, "is slow": slow}
SAID = {  # why the second has no weights; "": it has them
    "refuses to join": "no",
    "does not come": "b did not say within 3 s",
    "dies in a bucket": "it died",
    "hangs in a bucket": "b did not say within 3 s",
    "expects another push": "sent push 0 while this one takes push 17",
    "gets a damaged slice": "came damaged from process",
    "comes late": "",
    "is slow": "",
}


def whole(actor: Any, tensors: dict[str, Tensor]) -> bool:
    """Whether these are the policy's weights; collective."""
    exporter = Exporter(actor.manager.shards(), actor.topology.replica_group, bucket_bytes=2**20)
    expected = dict(exporter)
    same = [
        torch.equal(tensors.get(name, torch.zeros(())), each) for name, each in expected.items()
    ]
    return bool(same) and all(same)


def network_body(world: World, folder: Path) -> dict[str, Any]:
    """What each fault led to."""
    actor = build_actor(folder, ParallelConfig(tensor=2), token_cap=512)
    return {fault: pushed_twice(world, actor, fault) for fault in SAID}


def pushed_twice(world: World, actor: Any, fault: str) -> Any:
    GOES_ON.clear()
    WENT_ON.clear()
    engines = Engines("network", fault, first=world.rank == 0)
    weights = NetworkWeights(
        actor.manager.shards(), engines, bucket_bytes=20_000, host="127.0.0.1", seconds=SECONDS
    )
    begin = time.monotonic()
    metrics = weights.push(version=0)
    seconds = time.monotonic() - begin
    missed = dict(engines.missed)
    GOES_ON.set()
    if engines.workers and fault == "hangs in a bucket":  # a server that hangs is not pushed to
        assert WENT_ON.wait(4 * SECONDS)
    engines.fault, engines.there = "", ["a", "b"]
    with torch.no_grad():
        for item in actor.manager.bound:
            item.parameter.mul_(0.9)
    later = weights.push(version=1)
    assert all(each.intact for each in weights.checksums())
    held = [whole(actor, engines.workers[n].model.tensors if engines.workers else {}) for n in "ab"]
    weights.close()
    assert metrics["servers_healthy"] == 2.0 - len(missed) if world.rank == 0 else metrics
    ratios = [each["push_ratio"] for each in (metrics, later)]
    return missed, ratios, later["push_missed"], held, engines.landed, seconds


@pytest.fixture(scope="module")
def after_faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = save_tiny(tmp_path_factory.mktemp("faults") / "model", "qwen3")
    found: dict[str, Any] = run_ranks(2, network_body, folder)[0]
    return found


@pytest.mark.parametrize("fault", SAID)
def test_a_worker_that_fails_in_a_push_misses_it_alone_and_has_the_next(
    fault: str, after_faults: dict[str, Any]
) -> None:
    missed, ratios, missed_later, held, landed, seconds = after_faults[fault]
    said = SAID[fault]
    assert said in missed["b"] if said else not missed
    assert "a" not in missed
    assert held == [True, True] and missed_later == 0
    assert ratios[1] == 1
    assert [version for name, version in landed if name == "a"] == [0, 1]
    assert seconds < 10 * SECONDS


def disk_body(world: World, folder: Path, where: Path) -> Any:
    actor = build_actor(folder, ParallelConfig(tensor=2), token_cap=512)
    engines = Engines("disk", "comes late", first=world.rank == 0)
    weights = DiskWeights(actor.manager.shards(), engines, bucket_bytes=20_000, folder=where)
    seen: dict[str, Any] = {"first": weights.push(version=0)["push_ratio"]}
    with torch.no_grad():
        item = max(actor.manager.bound, key=lambda each: each.parameter.numel())
        item.parameter.mul_(0.9)
    seen["one tensor"] = weights.push(version=1)["push_ratio"]
    engines.there = ["a", "b"]  # which reads files of both versions
    seen["none"] = weights.push(version=2)["push_ratio"]
    tensors = [engines.workers[n].model.tensors if engines.workers else {} for n in "ab"]
    seen["held"] = [whole(actor, each) for each in tensors]
    seen["intact"] = all(each.intact for each in weights.checksums())

    real = disk_weights.save_file

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with torch.no_grad():
        for item in actor.manager.bound:
            item.parameter.mul_(0.9)
    disk_weights.save_file = full if world.rank else real  # type: ignore[assignment]
    with pytest.raises(EngineFault, match=r"No space left on device.*Push 3 did not happen"):
        weights.push(version=3)
    disk_weights.save_file = real
    seen["repeated"] = weights.push(version=3)["push_ratio"]

    def damaging(tensors: Any, path: Path) -> None:
        real(tensors, path)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    with torch.no_grad():
        for item in actor.manager.bound:
            item.parameter.mul_(0.9)
    disk_weights.save_file = damaging if world.rank else real  # type: ignore[assignment]
    with pytest.raises(EngineError, match="No server has the weights of push 4"):
        weights.push(version=4)
    disk_weights.save_file = real
    seen["missed"] = engines.missed.get("a", "")
    seen["mended"] = weights.push(version=5)["push_ratio"]
    tensors = [engines.workers[n].model.tensors if engines.workers else {} for n in "ab"]
    seen["held at the end"] = [whole(actor, each) for each in tensors]
    return seen


def test_files_bring_what_changed_and_what_is_damaged_or_finds_no_room_is_told(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3")
    first, _ = run_ranks(2, disk_body, folder, tmp_path / "weights")
    assert first["first"] == first["repeated"] == first["mended"] == 1
    assert 0 < first["one tensor"] < 0.5 and first["none"] == 0
    assert first["held"] == first["held at the end"] == [True, True]
    assert first["intact"]
    assert "is not as it was written" in first["missed"]
    versions = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert versions == ["version-3", "version-5"] or versions == ["version-4", "version-5"]
