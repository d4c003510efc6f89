"""Measures the host memory of a rollout, and the time to move it from the engines to the
micro-batches: everything of a step but models and engines.
"""

import gc
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rftmega.algorithms.mismatch import Gap
from rftmega.config import AlgorithmConfig, KLConfig
from rftmega.core.types import Completion, Prompt, Rollout, TokenStats, Trajectory
from rftmega.rollout.pool.gathered_rollouts import gathered, in_order
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.runtime.parallel.host_memory import HostMemory
from rftmega.runtime.parallel.process_group import World
from rftmega.trainer.experience import ExperienceMaker
from rftmega.trainer.group_collector import GroupCollector
from rftmega.trainer.learner import reference_kl
from rftmega.trainer.logprob_mismatch.gate import gap_of
from tests.ranks import run_ranks

PROCESSES, ROLLOUTS, SIBLINGS, PROMPT, LONGEST = 8, 512, 8, 512, 8192
SHORTEST = 1024  # tokens, if lengths differ
TIMES = 5
LOOK = 0.02  # seconds between memory measurements


class RandomScores:
    """RandomScores is a policy that scores at no cost: every process returns random numbers for its
    rows.
    """

    def __init__(self, world: World, host: HostMemory):
        self.world, self.host = world, host

    def log_probs(self, rows: Any, *, temperature: float | None = None) -> Any:
        targets, own = rows.lengths - 1, []
        for row in range(self.world.rank, len(rows), self.world.size):
            numbers = torch.rand(1, int(targets[row]))
            own.append((torch.tensor([row]), [numbers.neg(), numbers]))
        return TokenStats(*self.host.of_rows(targets, 2, own))

    reference_log_probs = log_probs


def lengths_of(ragged: bool) -> list[int]:
    """Returns the tokens of each rollout: all equal, or random if `ragged`."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(SHORTEST, LONGEST + 1, (ROLLOUTS,), generator=generator)
    return drawn.tolist() if ragged else [LONGEST] * ROLLOUTS


def rollout_of(prompt: Prompt, length: int) -> Rollout:
    size = length - PROMPT
    ids = tuple(torch.randint(100_000, (size,)).tolist())
    completion = Completion(ids, tuple(torch.rand(size).neg().tolist()), "stop", 0)
    return Rollout((Trajectory.of(prompt.token_ids, completion),), {"reward": float(size % 7)})


def step(world: World, host: HostMemory, own: dict[int, Rollout], prompts: list[Prompt]) -> Any:
    """Runs the data part of a step and returns the objects that it holds at its end."""
    where, rollouts, _ = gathered(own, host)
    found = in_order(where, rollouts, len(prompts))
    samples = GroupCollector(prompts, None, SIBLINGS).collected(found)  # type: ignore[arg-type]
    maker = ExperienceMaker(
        RandomScores(world, host), AlgorithmConfig(kl=KLConfig(coef=0.001)), host=host
    )
    experience = maker.make(samples)
    logp = experience.old_logp
    assert logp is not None
    gap: Gap = host.once(lambda: gap_of(samples, logp, samples.rows.mask))
    host.once(lambda: reference_kl(experience))
    share = range(world.rank, len(experience), world.size)
    for row in share:
        experience.select(torch.tensor([row])).padded()
    return samples, experience, gap


def held(pids: list[int]) -> float:
    """Returns the bytes of all processes; shared pages count once."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


def measure(world: World, copies: str, ragged: bool) -> tuple[float, float, float]:
    """Returns (seconds per step, bytes at its end, maximum within), relative to the memory before.

    A warm-up step excludes one-time allocations of Python, such as pages that processes share until
    one writes to them.
    """
    torch.manual_seed(world.rank)
    host = HostMemory(f"host {world.rank}" if copies == "a process" else "host")
    ids = tuple(range(PROMPT))
    prompts = [Prompt(ids, index=task // SIBLINGS) for task in range(ROLLOUTS)]
    share = ROLLOUTS // world.size
    tasks = range(world.rank * share, (world.rank + 1) * share)
    lengths = lengths_of(ragged)
    own = {task: rollout_of(prompts[task], lengths[task]) for task in tasks}
    step(world, host, own, prompts)
    gc.collect()
    pids = gather_objects(os.getpid())
    before = held(pids) if world.rank == 0 else 0.0
    most, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(LOOK):
            most[0] = max(most[0], held(pids))

    watching = threading.Thread(target=watch)
    if world.rank == 0:
        watching.start()
    dist.barrier()
    kept = step(world, host, own, prompts)
    dist.barrier()
    end = held(pids) if world.rank == 0 else 0.0
    dist.barrier()
    if world.rank == 0:
        done.set()
        watching.join()
    del kept
    seconds = []
    for _ in range(TIMES):
        dist.barrier()
        begin = time.perf_counter()
        kept = step(world, host, own, prompts)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
        del kept
    return statistics.median(seconds), end - before, most[0] - before


def one_copy_a_host(folder: Path) -> dict[str, float]:
    """Compares one copy per host with one per process, for 512 rollouts of 8192 tokens, and for as
    many of 1024 to 8192.
    """
    found: dict[str, float] = {}
    for name, ragged in (("8k", False), ("1k to 8k", True)):
        shared, theirs, most = run_ranks(PROCESSES, measure, "a host", ragged, timeout=600.0)[0]
        alone = run_ranks(PROCESSES, measure, "a process", ragged, timeout=600.0)[0]
        found |= {
            f"{name}: seconds_a_step": shared,
            f"{name}: mib_held": theirs / 2**20,
            f"{name}: mib_at_most": most / 2**20,
            f"{name}: seconds_over_a_copy_a_process": shared / alone[0],
            f"{name}: held_over_a_copy_a_process": theirs / alone[1],
        }
    return found
