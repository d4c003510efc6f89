"""The file that tools/launch.py writes, on a real Slurm of two nodes."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, metrics_of
from tests.slurm.cluster import Cluster, until

pytestmark = pytest.mark.slurm
START, END = 300, 300  # seconds, on a machine with much else to do


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

    def wait_for_step(self, step: int) -> None:
        until(lambda: (self.output / "metrics.jsonl").is_file() and max(self.steps()) >= step, START, f"step {step}")

    def wait(self) -> None:
        """Until it has finished. Raises AssertionError where it has failed."""
        until(lambda: self.state() not in ("PENDING", "RUNNING", "COMPLETING"), END, f"job {self.number} has ended")
        assert self.state() == "COMPLETED", (self.log(), self.log("-rank-0"), self.log("-rank-1"))

    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]


def submit(cluster: Cluster, config: Path, output: Path, *options: str) -> Job:
    command = [sys.executable, str(ROOT / "tools/launch.py"), "slurm", str(config), f"trainer.output={output}", *options]
    command += ["--nodes", "2", "--processes-per-node", "1", "--cpus-per-process", "1", "--submit"]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return Job(int(done.stdout.split("submitted   job ")[1].split()[0]), output, cluster)


def test_a_run_on_two_nodes_finishes(cluster: Cluster, arithmetic: Path, tmp_path: Path) -> None:
    job = submit(cluster, arithmetic / "run.yaml", tmp_path / "out")
    job.wait()
    assert job.steps() == [0, 1, 2, 3]
    assert "processes: 2" in job.log("-rank-0")
    assert "finished" in job.log()
    assert cluster.job(job.number)["NodeList"] == "n[1-2]"


def test_what_a_restart_cannot_mend_ends_the_job(cluster: Cluster, arithmetic: Path, tmp_path: Path) -> None:
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
