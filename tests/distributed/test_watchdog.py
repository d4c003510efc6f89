"""Hangs in a push and in an abort: the watch names rank, phase and the line that hangs, whichever
thread that is in.
"""

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.errors import EngineError
from rftmega.core.types import Sampling
from rftmega.rollout.engines import ScriptedEngine
from rftmega.rollout.pool.colocated_weights import ColocatedWeights
from rftmega.rollout.pool.engine_pool import ServerPool
from rftmega.rollout.servers import server as server_module
from rftmega.rollout.servers import server_engine as servers_module
from rftmega.rollout.servers.server import Server
from rftmega.rollout.servers.server_engine import ServerEngine
from rftmega.run.placement.phases import DevicePhases
from rftmega.runtime.parallel.process_group import World
from rftmega.runtime.parallel.watchdog import HUNG, watched
from rftmega.weights import EngineWeights
from rftmega.weights.transports.shared_weights import SharedWeights
from tests.distributed.test_engine_faults import PROMPTS, SEEDS, at_least
from tests.layouts import build_manager
from tests.ranks import run_ranks
from tests.rollouts import NEVER, pool_of
from tests.tiny_models import save_tiny

SECONDS = 1.0  # watched is only what hangs, for the machine may take any time for the rest


@contextmanager
def heard(file: Path) -> Iterator[None]:
    """What this process writes to stderr."""
    kept = os.dup(2)
    with file.open("w") as stream:
        os.dup2(stream.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


class HangsInALoad(ScriptedEngine):
    """From its second push on it stops at the third tensor, until somebody gives it up."""

    def __init__(self, rank: int):
        super().__init__(RolloutConfig(), vocabulary=50, stop_ids=[1])
        self.rank, self.hangs = rank, False
        self.given_up, self.codes = threading.Event(), list[int]()

    def give_up(self, code: int) -> None:
        self.codes.append(code)
        self.given_up.set()

    def waits_for_ever(self) -> None:
        self.given_up.wait()

    def _load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        super()._load_weights(self._until_it_hangs(named_tensors))

    def _until_it_hangs(
        self, named_tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        for number, named in enumerate(named_tensors):
            if self.hangs and number == 2:
                with watched(SECONDS, self.rank, end=self.give_up):
                    self.waits_for_ever()
            yield named


def load_body(world: World, folder: Path, said: Path) -> Any:
    """On the second process a load hangs; the first waits for it in a collective."""
    manager = build_manager(folder, ParallelConfig(tensor=2))
    engine = HangsInALoad(world.rank)
    turns = DevicePhases({"policy": manager.residency}, engine=engine, offload=False)
    weights = ColocatedWeights(EngineWeights(manager.shards(), engine, bucket_bytes=10_000), turns)
    weights.push(version=0)
    engine.hangs = world.rank == 1
    with heard(said / str(world.rank)):
        weights.push(version=1)
    return engine.codes


def test_a_load_that_hangs_in_a_push_is_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3")
    assert run_ranks(2, load_body, folder, tmp_path) == [[], [HUNG]]
    said = (tmp_path / "1").read_text()
    assert "[rank 1] hung: no progress for" in said
    assert "in the phase push (" in said
    assert "test_watchdog.py" in said and "in waits_for_ever" in said
    assert "in push" in said, "who asked for it"


class WatchedServer(Server):
    """Its `hung` is a path that does not answer; the server is ended where the process would be."""

    hung, rank = "", 0

    def post(
        self, path: str, body: dict[str, Any] | None = None, seconds: float | None = None
    ) -> None:
        if path != self.hung:
            super().post(path, body, seconds)
            return
        with watched(SECONDS, self.rank, end=lambda code: self._process.kill()):
            super().post(path, body, seconds)


class HangsOnce(ServerEngine):
    """One scripted server in vLLM's place, that never answers one path."""

    path = ""

    def _started(self, number: int) -> Server:
        # so that one is being answered when there are enough
        self._arguments = ["--hang", self.path, "--pause", "0.2"]
        return super()._started(number)


def server_body(world: World, folder: Path, path: str, said: Path) -> str:
    server_module.PROGRAM, servers_module.Server = "scripted_server", WatchedServer  # type: ignore[misc]
    # not as tests.scripted_server: the package imports torch
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    WatchedServer.hung, WatchedServer.rank, HangsOnce.path = path, world.rank, path
    manager = build_manager(folder, ParallelConfig(tensor=2))
    engine = HangsOnce(
        folder, RolloutConfig(max_batch=2), world, dtype="float32", stop_ids=[NEVER], logs=said
    )
    turns = DevicePhases({"policy": manager.residency}, offload=False)
    weights = ColocatedWeights(SharedWeights(manager.shards(), engine, bucket_bytes=10_000), turns)
    shared = pool_of(
        engine, turns, world, weights, processes_per_engine=world.size, restarts=0, kind=ServerPool
    )
    try:
        with heard(said / str(world.rank)):
            weights.push(version=4)
            shared.generate(
                PROMPTS, seeds=SEEDS, sampling=Sampling(1.0), enough=partial(at_least, 3)
            )
    except EngineError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing hung"


@pytest.mark.parametrize(
    ("path", "phase", "asked_by"),
    [
        pytest.param("update_weights", "push", "in take", marks=pytest.mark.ranks),
        ("abort_requests", "rollout", "in _serve"),
    ],
)
def test_a_server_that_hangs_in_a_push_or_an_abort_is_named(
    path: str, phase: str, asked_by: str, tmp_path: Path
) -> None:
    """It is asked in a thread of its own."""
    fault, _ = run_ranks(2, server_body, save_tiny(tmp_path / "model", "qwen3"), path, tmp_path)
    assert "does not answer" in fault
    said = (tmp_path / "0").read_text()
    assert "[rank 0] hung: no progress for" in said
    assert f"in the phase {phase} (" in said
    assert "server_engine.py" in said and "in post" in said
    assert asked_by in said
