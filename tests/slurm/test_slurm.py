"""The file that tools/launch.py writes, on a real Slurm of two nodes."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import ROOT, metrics_of
from tests.elastic_nodes import rounds_of
from tests.slurm.cluster import Cluster, until

pytestmark = pytest.mark.slurm
START, END = 300, 600  # seconds, on a machine with much else to do
LONG = ("trainer.steps=8", "checkpoint.every=1")


@dataclass(frozen=True)
class Job:
    number: int
    output: Path
    cluster: Cluster

    def log(self, name: str = "") -> str:
        """Of the job, or of "-rank-R"."""
        path = self.output / f"slurm/{self.number}{name}.log"
        return path.read_text() if path.is_file() else ""

    def steps(self) -> list[int]:
        return [int(record["step"]) for record in metrics_of(self.output)]

    def trained(self) -> list[tuple[float, ...]]:
        """What does not depend on time, of every step."""
        return [
            tuple(record.get(name, 0.0) for name in ("step", "loss", "reward", "grad_norm"))
            for record in metrics_of(self.output)
        ]

    def wait_for_step(self, step: int) -> None:
        until(
            lambda: (self.output / "metrics.jsonl").is_file() and max(self.steps()) >= step,
            START,
            f"step {step}",
        )

    def wait(self) -> None:
        """Until it has finished. Raises AssertionError where it has failed."""
        until(
            lambda: self.state() not in ("PENDING", "RUNNING", "COMPLETING"),
            END,
            f"job {self.number} has ended",
        )
        assert self.state() == "COMPLETED", (self.log(), self.log("-rank-0"), self.log("-rank-1"))

    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]


def submit(
    cluster: Cluster,
    config: Path,
    output: Path,
    *options: str,
    nodes: tuple[str, ...] = ("--nodes", "2"),
) -> Job:
    """`nodes`: the options that say on how many."""
    command = [
        sys.executable,
        str(ROOT / "tools/launch.py"),
        "slurm",
        str(config),
        f"trainer.output={output}",
        *options,
    ]
    command += [
        *nodes,
        "--processes-per-node",
        "1",
        "--cpus-per-process",
        "1",
        "--submit",
    ]
    done = subprocess.run(
        command,
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return Job(int(done.stdout.split("submitted   job ")[1].split()[0]), output, cluster)


@pytest.fixture(scope="module")
def uninterrupted(
    cluster: Cluster, arithmetic: Path, tmp_path_factory: pytest.TempPathFactory
) -> Job:
    job = submit(
        cluster, arithmetic / "run.yaml", tmp_path_factory.mktemp("uninterrupted") / "out", *LONG
    )
    job.wait()
    return job


def test_a_run_on_two_nodes_finishes(cluster: Cluster, arithmetic: Path, tmp_path: Path) -> None:
    job = submit(cluster, arithmetic / "run.yaml", tmp_path / "out")
    job.wait()
    assert job.steps() == [0, 1, 2, 3]
    assert "processes: 2" in job.log("-rank-0")
    assert "finished" in job.log()
    assert cluster.job(job.number)["NodeList"] == "n[1-2]"


def test_servers_run_on_nodes_of_their_own(
    cluster: Cluster, arithmetic: Path, tmp_path: Path
) -> None:
    job = submit(
        cluster,
        arithmetic / "run.yaml",
        tmp_path / "out",
        *("strategy=separate", "rollout.transport=network", "rollout.engine=vllm"),
        *("rollout.cpu_cache_gib=0.05", "algorithm.kl.coef=0"),
        nodes=("--nodes", "1", "--server-nodes", "1"),
    )
    job.wait()
    assert job.steps() == [0, 1, 2, 3]
    assert "processes: 1" in job.log("-rank-0")
    assert "finished" in job.log()
    trained = [record for record in metrics_of(job.output) if "loss" in record]
    assert {record["servers_healthy"] for record in trained} == {1.0}
    assert max(record["logprob_gap_max"] for record in trained) < 1e-4
    assert "server 0 answers at http://127.0.0.1:" in job.log("-servers-0")
    until(lambda: not servers_of(arithmetic / "model"), START, "the servers have ended")


def servers_of(model: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if f"--model={model}" in (process.info["cmdline"] or ())
    ]


def test_what_a_restart_cannot_mend_ends_the_job(
    cluster: Cluster, arithmetic: Path, tmp_path: Path
) -> None:
    """A config that was right when it was submitted, and is not when the job starts."""
    config = tmp_path / "run.yaml"
    config.write_text((arithmetic / "run.yaml").read_text())
    cluster.command("scontrol", "update", "NodeName=n[1-2]", "State=DRAIN", "Reason=test")
    job = submit(cluster, config, tmp_path / "out")
    config.write_text("model: {}")
    cluster.command("scontrol", "update", "NodeName=n[1-2]", "State=RESUME")
    until(lambda: job.state() == "FAILED", START, "the job fails")
    assert "refused: the error is in" in job.log()
    assert "error: " in job.log("-rank-0")
    assert cluster.job(job.number)["Restarts"] == "0"


def stopped_by_a_signal(job: Job) -> None:
    """As Slurm does before the time limit."""
    job.cluster.command("scancel", "--signal=USR1", job.number)


def put_back(job: Job) -> None:
    job.cluster.command("scontrol", "requeue", job.number)


def killed(job: Job) -> None:
    """Rank 1, as the kernel does when memory is short."""
    ranks = [
        process
        for process in psutil.process_iter(["cmdline"])
        if f"trainer.output={job.output}" in process.info["cmdline"]
    ]
    (second,) = [
        process
        for process in ranks
        if process.name() != "srun" and process.environ().get("RANK") == "1"
    ]
    second.kill()


@pytest.mark.parametrize("end", [stopped_by_a_signal, put_back, killed])
def test_a_run_that_is_interrupted_goes_on_and_ends_as_if_nothing_had_been(
    end: Callable[[Job], None],
    uninterrupted: Job,
    cluster: Cluster,
    arithmetic: Path,
    tmp_path: Path,
) -> None:
    job = submit(cluster, arithmetic / "run.yaml", tmp_path / "out", *LONG)
    job.wait_for_step(2)
    end(job)
    until(
        lambda: cluster.job(job.number)["Restarts"] == "1",
        START,
        "the job is put back into the queue",
    )
    job.wait()
    assert ("failed with 137" in job.log()) == (end is killed)
    assert job.trained() == uninterrupted.trained()


ELASTIC = ("--elastic", "1:2")


def supervisor_of(job: Job, node: str) -> psutil.Process:
    """The supervisor that runs on a node of an elastic job."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if f"trainer.output={job.output}" in (process.info["cmdline"] or ())
        and process.name() not in ("srun", "bash")
        and process.environ().get("SLURMD_NODENAME") == node
    ]
    return min(found, key=lambda process: process.create_time())


def test_an_elastic_run_goes_on_without_a_node_and_with_it_when_it_is_back(
    cluster: Cluster, arithmetic: Path, tmp_path: Path
) -> None:
    steps = ("trainer.steps=120", "checkpoint.every=2")
    job = submit(cluster, arithmetic / "run.yaml", tmp_path / "out", *steps, nodes=ELASTIC)
    job.wait_for_step(2)
    supervisor = supervisor_of(job, "n1")
    for process in [supervisor, *supervisor.children(recursive=True)]:
        process.kill()
    job.wait()
    assert "the supervisor of n1 ended with 137 and is started again" in job.log()
    assert "finished" in job.log() and cluster.job(job.number)["Restarts"] == "0"
    members = [[name for name, _ in found["members"]] for found in rounds_of(job.output)]  # type: ignore[attr-defined]
    assert members == [["n1", "n2"], ["n2"], ["n2", "n1"]]
    assert job.steps() == list(range(121))


def test_an_elastic_run_that_is_asked_to_stop_saves_and_goes_on_later(
    cluster: Cluster, arithmetic: Path, tmp_path: Path, uninterrupted: Job
) -> None:
    job = submit(cluster, arithmetic / "run.yaml", tmp_path / "out", *LONG, nodes=ELASTIC)
    job.wait_for_step(2)
    stopped_by_a_signal(job)
    until(lambda: cluster.job(job.number)["Restarts"] == "1", START, "the job is put back")
    job.wait()
    assert job.trained() == uninterrupted.trained()


def test_an_elastic_run_that_is_refused_is_not_started_again(
    cluster: Cluster, arithmetic: Path, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text((arithmetic / "run.yaml").read_text())
    cluster.command("scontrol", "update", "NodeName=n[1-2]", "State=DRAIN", "Reason=test")
    job = submit(cluster, config, tmp_path / "out", *LONG, nodes=ELASTIC)
    config.write_text("model: {}")
    cluster.command("scontrol", "update", "NodeName=n[1-2]", "State=RESUME")
    until(lambda: job.state() == "FAILED", START, "the job fails")
    assert "refused: the error is in" in job.log() and "error: " in job.log("-n1")
    assert cluster.job(job.number)["Restarts"] == "0"
