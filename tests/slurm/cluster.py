"""A real Slurm on this machine: slurmctld and one slurmd a node, all of it in one folder, and gone
at the end.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
KillWait=20
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why a Slurm can't be started here; empty where it can.

    Installs Debian's packages where it may.
    """
    if os.geteuid() != 0:
        return "slurmctld and slurmd are started as root, and this is not root"
    if missing() and shutil.which("apt-get"):
        for command in (
            ["update"],
            ["install", "-y", "--no-install-recommends", "slurm-wlm", "munge"],
        ):
            subprocess.run(
                ["apt-get", "-qq", *command],
                env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=300,
            )
    return f"apt-get install slurm-wlm munge gave no {', '.join(missing())}" if missing() else ""


def missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


@dataclass(frozen=True)
class Cluster:
    """Commands to a cluster of two nodes, n1 and n2, that runs."""

    folder: Path
    environment: dict[str, str]

    def command(self, *arguments: object, timeout: float = 60) -> str:
        """What it prints. Raises AssertionError with what it complains about."""
        done = subprocess.run(
            list(map(str, arguments)),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Restarts, ExitCode, ..."""
        words = self.command("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def states(self) -> list[str]:
        return self.command("sinfo", "--noheader", "--Node", "--format=%T").split()


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Within, a cluster runs; its logs and state are in `folder`."""
    with ExitStack() as closing:
        probes = [closing.enter_context(socket.socket()) for _ in range(3)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    (folder / "state").mkdir(parents=True)
    for name in ("n1", "n2"):
        (folder / f"spool-{name}").mkdir()
    folder.chmod(0o755)
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(folder=folder, host=socket.gethostname().split(".")[0], ports=ports)
    )
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    outside = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_"))
    }
    cluster = Cluster(folder, outside | {"SLURM_CONF": str(config)})
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log",
             "seed-file": "munge.seed"}  # fmt: skip
    munge = [
        "munged",
        "--foreground",
        "--force",
        *(f"--{option}={folder / name}" for option, name in files.items()),
    ]
    with ExitStack() as stack:
        stack.enter_context(_process(munge, cluster))
        until((folder / "munge.socket").exists, 20, "munged opens its socket")
        stack.enter_context(_process(["slurmctld", "-D", "-c"], cluster))
        for name in ("n1", "n2"):
            stack.enter_context(_process(["slurmd", "-D", "-N", name], cluster))
        until(
            lambda: cluster.states() == ["idle", "idle"],
            60,
            "both nodes are idle",
            errors=AssertionError,
        )
        yield cluster
        cluster.command("scancel", "--user=root")
        until(lambda: not cluster.command("squeue", "--noheader"), 60, "all jobs have ended")


@contextmanager
def _process(command: Sequence[str], cluster: Cluster) -> Iterator[None]:
    with (cluster.folder / f"{command[0]}-{command[-1]}.out".replace("/", "_")).open("w") as log:
        process = subprocess.Popen(
            command, env=cluster.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


def until(
    holds: Callable[[], bool], seconds: float, what: str, errors: type[Exception] | tuple[()] = ()
) -> None:
    """Waits. Raises TimeoutError that says what did not come true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if holds():
                return
        except errors:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"not within {seconds:g} s: {what}")
