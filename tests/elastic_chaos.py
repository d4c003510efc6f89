"""Elastic runs whose nodes fail at random moments: `make chaos`, or

    python -m tests.elastic_chaos [--seeds N] [--first SEED]

Each seed is a run of two nodes on this machine, of one rank each, to which one thing happens: all
processes of a node are killed; it is stopped and goes on later; it is asked to leave; both are
killed and started again; a third node is added. A node that is gone comes back. The run must end
with code 0, every step once and in order, each prompt trained on once, and the weights of a run that
nothing disturbed (but for another order of sums), and leave no process and no lease behind. Prints
the seconds from the failure to the next step, and writes runs/elastic_chaos.json.
"""

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file
from tqdm import tqdm

from benchmarks import machine
from tests.e2e.conftest import train_rl, write_arithmetic
from tests.e2e.test_elastic import prompts_of
from tests.elastic_nodes import Node, rounds_of, steps_of, until

STEPS = 30
LEASE = 4.0
OPTIONS = [
    f"trainer.steps={STEPS}",
    *("trainer.trajectories=1", "trainer.prompts_per_step=4", "trainer.export=true"),
    *("checkpoint.every=1", "faults.check_replicas_every=1", "data.eval="),
]
CLOSE = 1e-5  # of a weight: sums in another order, over 30 steps


@dataclass(frozen=True)
class Outcome:
    """Outcome is what came of a seed: `seconds` from the failure to the next step; `problem`: why
    the run is not as it should be, empty if it is.
    """

    seed: int
    kind: str
    step: int
    rounds: int
    seconds: float
    problem: str = ""


def killed(nodes: list[Node], start: Callable[[str], Node], rng: random.Random) -> None:
    """A node loses its power and comes back."""
    victim = nodes.pop(rng.randrange(2))
    victim.kill()
    nodes.append(start(victim.name))


def stopped(nodes: list[Node], start: Callable[[str], Node], rng: random.Random) -> None:
    """A node stands still for longer than a lease, and goes on."""
    victim = nodes[rng.randrange(2)]
    victim.signal(signal.SIGSTOP)
    time.sleep(LEASE + 4 * rng.random())
    victim.signal(signal.SIGCONT)


def left(nodes: list[Node], start: Callable[[str], Node], rng: random.Random) -> None:
    """A node is asked to leave, and another takes its place."""
    victim = nodes.pop(rng.randrange(2))
    victim.process.terminate()
    code = victim.end()
    assert code == 75, f"{victim.name} left with {code}:\n{victim.said}"
    nodes.append(start("new"))


def both_killed(nodes: list[Node], start: Callable[[str], Node], rng: random.Random) -> None:
    """Two nodes fail within a second, and come back."""
    rng.shuffle(nodes)
    names = [node.name for node in nodes]
    for node in nodes:
        node.kill()
        time.sleep(rng.random())
    nodes[:] = [start(name) for name in names]


def added(nodes: list[Node], start: Callable[[str], Node], rng: random.Random) -> None:
    """A third node is there, and takes the place of one that is killed."""
    nodes.append(start("third"))
    time.sleep(15 * rng.random())
    nodes.pop(rng.randrange(2)).kill()


KINDS = (killed, stopped, left, both_killed, added)


def outcome_of(seed: int, folder: Path, whole: Path) -> Outcome:
    """Returns what comes of a run to which the seed's kind of failure happens at a random step."""
    rng, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    output = folder / f"seed{seed}"
    options = [f"trainer.output={output}", *OPTIONS]
    spoiled = rng.randrange(1, STEPS // 2)

    def start(name: str) -> Node:
        return Node(name, folder / "run.yaml", options, nodes="1:2", lease=LEASE)

    nodes = [start("a"), start("b")]
    seconds = 0.0
    try:
        until(lambda: steps_of(output) > spoiled, nodes)
        time.sleep(rng.random())
        begin = time.monotonic()
        kind(nodes, start, rng)
        struck = steps_of(output)
        until(lambda: steps_of(output) != struck or not running(nodes), nodes)
        seconds = time.monotonic() - begin
        codes = [node.end(240) for node in nodes]
        problem = problem_of(output, whole, codes)
    except AssertionError as error:
        problem = str(error)
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.signal(signal.SIGCONT)
                node.kill()
    rounds = len(rounds_of(output))
    if not problem:
        shutil.rmtree(output)
    return Outcome(seed, kind.__name__, spoiled, rounds, seconds, problem)


def running(nodes: Sequence[Node]) -> bool:
    return any(node.process.poll() is None for node in nodes)


def problem_of(output: Path, whole: Path, codes: Sequence[int]) -> str:
    """Returns in what a run differs from one that nothing disturbed; empty if in nothing."""
    if any(codes):
        return f"exit codes {codes}"
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    if [line["step"] for line in lines] != list(range(STEPS + 1)):
        return f"steps {[line['step'] for line in lines]}"
    if prompts_of(output) != prompts_of(whole):
        return "other prompts, or in another order"
    weights, others = (
        load_file(each / "policy/model-00001-of-00001.safetensors") for each in (output, whole)
    )
    apart = max(float((weights[name] - others[name]).abs().max()) for name in others)
    if not apart < CLOSE:
        return f"weights are {apart:.1e} apart"
    if list((output / "elastic/members").iterdir()):
        return "a lease was left behind"
    left_over = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(output) in " ".join(process.info["cmdline"] or ())
    ]
    return f"processes were left behind: {left_over}" if left_over else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=40, help="number of runs (40)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="elastic-chaos-"))
    write_arithmetic(folder)
    whole = folder / "whole"
    done = train_rl(folder / "run.yaml", f"trainer.output={whole}", *OPTIONS, "--processes", 2)
    assert done.returncode == 0, done.stderr
    torch.set_num_threads(1)
    outcomes = []
    for seed in tqdm(range(given.first, given.first + given.seeds), unit="run"):
        outcomes.append(outcome_of(seed, folder, whole))
        if outcomes[-1].problem:
            sys.stderr.write(f"\nseed {seed}, {outcomes[-1].kind}: {outcomes[-1].problem}\n")
    target = Path("runs/elastic_chaos.json")
    target.parent.mkdir(exist_ok=True)
    said = {"machine": machine.here(), "outcomes": [asdict(each) for each in outcomes]}
    target.write_text(json.dumps(said, indent=1))
    for kind in KINDS:
        of_kind = [each for each in outcomes if each.kind == kind.__name__]
        good = [each.seconds for each in of_kind if not each.problem]
        if of_kind:
            seconds = f"{statistics.median(good):.1f} s, most {max(good):.1f} s" if good else "-"
            sys.stdout.write(
                f"{kind.__name__}: {len(good)} of {len(of_kind)} runs; next step after {seconds}\n"
            )
    bad = [each for each in outcomes if each.problem]
    if not bad:
        shutil.rmtree(folder)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
