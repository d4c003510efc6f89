"""The fault table: kill -9 of a random rank at random moments, or a request to stop, and what the
run ends with that goes on.

`make chaos` runs every case, prints one row each and writes runs/chaos.json. A case is a run of
real ranks, one of which strikes itself at a random moment of a random phase: with SIGKILL, and the
launcher starts all of them again; or with SIGTERM, and all of them save within the step and end, to
be started as Slurm does with what it requeues. The exported weights must equal those of a run that
nothing interrupted byte for byte, and metrics.jsonl line for line, but for what is of the machine
(`UNLIKE`).
"""

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import machine
from rftmega import config as configuration
from rftmega.checkpoints import retention
from rftmega.checkpoints.reader import read_manifest
from rftmega.config import RunConfig
from rftmega.monitoring.observers.checkpointing import WITHIN
from rftmega.run import api, preflight
from rftmega.run.local_launcher import launch
from rftmega.runtime.parallel import watchdog
from tests.e2e.conftest import UNLIKE, numbers_of, write_arithmetic

PHASES = ("rollout", "score", "update", "push", "save")
COMMON = [
    "trainer.steps=6",
    "trainer.prompts_per_step=4",
    "trainer.export=true",
    "checkpoint.every=2",
    "checkpoint.keep=2",
]
COMMON += ["algorithm.updates_per_epoch=2"]
RUNS: dict[str, tuple[int, int, int, list[str]]] = {  # processes, kills, requests to stop, options
    "scripted, TP2 x PP2": (4, 10, 5, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "scripted, TP2 x DP2, distributed optimizer": (
        4,
        10,
        5,
        ["parallel.tensor=2", "optimizer.distributed=true"],
    ),
    "scripted, partial rollouts, PP2": (
        2,
        5,
        5,
        [
            "parallel.pipeline=2",
            "trainer.max_staleness=2",
            "algorithm.importance_sampling=token",
            "rollout.max_response_tokens=40",
            "rollout.max_batch=8",
        ],
    ),
    "vllm, TP2": (
        2,
        4,
        3,
        [
            "parallel.tensor=2",
            "rollout.engine=vllm",
            "rollout.cpu_cache_gib=0.05",
            "rollout.max_batch=16",
        ],
    ),
}


@dataclass(frozen=True)
class Strike:
    """Rank `rank` gets the signal `delay` seconds after its `occurrence`-th phase of this name has
    begun.
    """

    signal: str
    rank: int
    phase: str
    occurrence: int
    delay: float


def rank(config: RunConfig, strike: Strike | None, log: str) -> int:
    """train_rl.py's, with its words in a file, and a thread that strikes in the first start."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if strike is not None and first and int(os.environ["RANK"]) == strike.rank:
        threading.Thread(target=strike_out, args=(strike, f"{log}.strike"), daemon=True).start()
    return api.rank(config, b"")


def strike_out(strike: Strike, note: str) -> None:
    seen, begun = "", 0
    while begun < strike.occurrence:
        phase = watchdog.seen.phase
        begun += phase == strike.phase and phase != seen
        seen = phase
        time.sleep(0.0002)
    time.sleep(strike.delay)
    Path(note).write_text(watchdog.seen.phase)
    os.kill(os.getpid(), signal.Signals[strike.signal])


def run(
    folder: Path, output: Path, processes: int, options: list[str], strike: Strike | None
) -> int:
    """The exit code of a run in this process's launcher, whose server of forks all runs share."""
    config = configuration.load(
        folder / "run.yaml",
        [*COMMON, *options, f"trainer.output={output}", "faults.max_restarts=2"],
    )
    preflight.preflight(config, processes, local=True)
    preload = ["rftmega.run.preloaded", "tests.chaos"]
    return launch(
        processes,
        rank,
        config,
        strike,
        f"{output}.log",
        preload=preload,
        max_restarts=config.faults.max_restarts,
        stops=True,
    )


def result(output: Path) -> tuple[str, list[dict[str, Any]]]:
    """(digest of the exported weights, metrics without times)."""
    digest = hashlib.sha256()
    for file in sorted((output / "policy").glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest(), numbers_of(output)


def strikes(
    kills: int, requests: int, processes: int, spent: dict[str, float], seed: int
) -> Iterator[Strike]:
    """At random, though each phase has its turn.

    `spent`: seconds that a phase takes, on average.
    """
    rng = random.Random(seed)
    for kind, strikes_of in (("SIGKILL", kills), ("SIGTERM", requests)):
        for number in range(strikes_of):
            phase = PHASES[number % len(PHASES)]
            times = 3 if phase == "save" else 6
            yield Strike(
                kind,
                rng.randrange(processes),
                phase,
                rng.randint(1, times),
                rng.uniform(0, spent.get(phase, 0.05)),
            )


def done_of_the_last_step(output: Path) -> int | None:
    """How much of its step a run had done that was asked to stop; None before its first step, where
    there is nothing to save.
    """
    if not (output / "checkpoints" / retention.LATEST).exists():
        metrics = output / "metrics.jsonl"
        assert not metrics.exists() or not metrics.read_text(), (
            "it had done steps, and saved nothing"
        )
        return None
    return len(read_manifest(retention.find(output / "checkpoints", None))["state"].get(WITHIN, []))


def every_case(folder: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    write_arithmetic(folder)
    with tqdm(
        total=sum(RUNS[name][1] + RUNS[name][2] + 1 for name in names), unit="run", file=sys.stderr
    ) as bar:
        for name in names:
            processes, kills, requests, options = RUNS[name]
            bar.set_postfix_str(name)
            whole = folder / name.replace(" ", "_")
            assert run(folder, whole, processes, options, None) == 0, Path(
                f"{whole}.log"
            ).read_text()[-3000:]
            wanted = result(whole)
            bar.update()
            lines = [
                json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()
            ]
            spent = {phase: lines[-1].get(f"seconds_{phase}", 0.05) for phase in PHASES}
            for number, strike in enumerate(
                strikes(kills, requests, processes, spent, seed=len(name))
            ):
                output = folder / f"{whole.name}-{number}"
                begin = time.monotonic()
                code = run(folder, output, processes, options, strike)
                done_within = None
                if code == RunConfig().faults.requeue_code:
                    done_within = done_of_the_last_step(output)
                    code = run(folder, output, processes, options, None)
                seconds = time.monotonic() - begin
                note, log = Path(f"{output}.log.strike"), Path(f"{output}.log").read_text()
                found = result(output) if code == 0 else ("", [])
                case = {
                    "run": name,
                    **asdict(strike),
                    "struck_in": note.read_text() if note.exists() else "nowhere",
                }
                case |= {
                    "done_within": done_within,
                    "seconds": round(seconds, 1),
                    "exit_code": code,
                }
                case |= {
                    "weights_equal": found[0] == wanted[0],
                    "metrics_equal": found[1] == wanted[1],
                }
                if not (case["weights_equal"] and case["metrics_equal"]):
                    case["log"] = log[-3000:]
                yield case
                bar.update()


def survived(case: dict[str, Any]) -> bool:
    """One that was not struck shows nothing."""
    return case["struck_in"] != "nowhere" and case["weights_equal"] and case["metrics_equal"]


def counted(cases: list[dict[str, Any]]) -> dict[str, int]:
    """Returns the figures of a row in docs/results.md."""
    return {"cases": len(cases), "equal": sum(map(survived, cases))}


def main() -> int:
    names = [
        name
        for name in RUNS
        if not sys.argv[1:] or any(name.startswith(given) for given in sys.argv[1:])
    ]
    header = ["run", "signal", "rank", "phase", "occurrence", "struck_in", "done_within", "seconds"]
    header += ["weights_equal", "metrics_equal"]
    sys.stdout.write("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|\n")
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for case in every_case(Path(folder), names):
            cases.append(case)
            sys.stdout.write("| " + " | ".join(str(case[name]) for name in header) + " |\n")
            sys.stdout.flush()
            Path("runs").mkdir(exist_ok=True)
            Path("runs/chaos.json").write_text(
                json.dumps(
                    {
                        "machine": machine.here(),
                        "rows": {", ".join(sys.argv[1:]) or "all": counted(cases)},
                        "excluded_from_metrics": UNLIKE,
                        "cases": cases,
                    },
                    indent=1,
                )
            )
    good = sum(map(survived, cases))
    sys.stdout.write(
        f"\n{good} of {len(cases)} runs ended with the weights and metrics of the uninterrupted one\n"
    )
    return 0 if good == len(cases) else 1


if __name__ == "__main__":
    from tests.chaos import main as of_the_module  # ranks import it by this name

    sys.exit(of_the_module())
