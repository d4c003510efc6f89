"""train_rl.py with a fault planted in its ranks: `PLANTED=slow python -m tests.e2e.planted CONFIG
option=value ... --processes N`

slow     In each update, which must be one micro-batch, rank 1 waits until rank 0 has computed its own; then ten times as long:
         whatever the machine does, it is the slowest. Lease still for half a second is named.
server   When the second policy's third answer is there, the last vLLM server is killed, with all that it has started.
core     Likewise, but only the process that computes: the one that listens lives on.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

import train_rl
from rftmega.config import RunConfig
from rftmega.run import api
from rftmega.runtime.device.spans import REDUCE, recorder

plain_rank = api.rank
LEAST = 1.0  # seconds of a wait, so that a busy machine makes nothing else of a step longer
ENGINE_CORE = "VLLM::EngineCore"  # as vLLM calls it in `ps`


def rank(config: RunConfig, functions: bytes) -> int:
    """`api`'s."""
    kind, output = os.environ["PLANTED"], Path(config.trainer.output)
    output.mkdir(parents=True, exist_ok=True)
    slow(output / "rank-0.seconds") if kind == "slow" else struck(kind, output / "struck")
    return plain_rank(config, functions)


def slow(noted: Path) -> None:
    """`noted`: what each update took rank 0, a line each."""
    from rftmega.backends.megatron import timers
    from rftmega.backends.megatron.model_runner import MegatronRunner
    from rftmega.runtime.parallel import lease

    lease.LIMIT, lease.ROUND = LEAST / 2, LEAST / 20
    plain, begin, updates = MegatronRunner.forward_step, 0.0, 0

    def forward_step(self: MegatronRunner, *arguments: Any) -> Any:
        nonlocal begin, updates
        if torch.is_grad_enabled():
            begin, updates = time.monotonic(), updates + 1
            if os.environ["RANK"] == "1":
                time.sleep(max(LEAST, 10 * seconds_of(noted, updates)))
        return plain(self, *arguments)

    def start(self: timers.Timer, barrier: bool = False) -> None:
        if self.name == REDUCE and os.environ["RANK"] == "0":
            with noted.open("a") as file:
                file.write(f"{time.monotonic() - begin}\n")
        recorder.start(self.name)

    MegatronRunner.forward_step = forward_step  # type: ignore[method-assign]
    timers.Timer.start = start  # type: ignore[method-assign]


def seconds_of(noted: Path, update: int) -> float:
    """Waits for the line."""
    while not (noted.is_file() and noted.read_text().count("\n") >= update):
        time.sleep(0.01)
    return float(noted.read_text().splitlines()[update - 1])


def struck(kind: str, note: Path) -> None:
    """`note` holds the answers of that rollout, of before and after the kill."""
    from rftmega.rollout.servers.server_engine import ServerEngine

    plain, completions = ServerEngine.part, 0

    async def part(self: ServerEngine, *given: Any) -> Any:
        nonlocal completions
        found = await plain(self, *given)
        if self.version == 1:
            completions += 1
            if completions == 3:
                kill(kind, self.servers[-1]._process.pid)  # type: ignore[attr-defined]
            note.write_text(str(completions))
        return found

    ServerEngine.part = part  # type: ignore[method-assign]


def kill(kind: str, server: int) -> None:
    if kind == "server":
        os.killpg(server, signal.SIGKILL)
        return
    (core,) = (
        child
        for child in psutil.Process(server).children()
        if ENGINE_CORE in " ".join(child.cmdline())
    )
    core.kill()


if __name__ == "__main__":
    from tests.e2e import planted  # ranks import it by this name

    api.rank = planted.rank
    api.prepare()
    sys.exit(train_rl.main())
