"""Starts a run on a Slurm cluster, through an sbatch file, or on this machine. The config is checked
before anything is written.

    rftmega launch slurm CONFIG [option=value ...] --nodes N --gpus-per-node G [--time 24:00:00 --partition P ...] [--submit]
    rftmega launch slurm CONFIG [option=value ...] --nodes N --processes-per-node P     # nodes without GPUs
    rftmega launch slurm CONFIG strategy=separate rollout.transport=network ... --server-nodes M [--servers-per-node K]
    rftmega launch local CONFIG [option=value ...] --processes N

The file is trainer.output/slurm/run.sbatch. Logs are in the same folder: JOB.log of the job and
JOB-rank-R.log of each rank. srun starts one process per GPU; the processes meet at the first node.
Before the time limit, and at `scancel --signal=USR1 JOB`, ranks save and the job is requeued. After
a failure the job is requeued, too. The file contains the environment variables that the program
reads, except those that look like secrets: sbatch passes the secrets on from the shell that calls
it. Paths must be the same on all nodes. See docs/cluster.md.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rftmega.config.secrets import holds_secrets
from rftmega.core.errors import ConfigError, exit_code_of
from rftmega.run.option_parser import OptionParser
from rftmega.tools import slurm_server_step

if TYPE_CHECKING:
    from rftmega.config import RunConfig

ABOVE = Path(__file__).resolve().parents[1]
SCRIPT = ABOVE / "train_rl.py"
ROOT = ABOVE if SCRIPT.exists() else ABOVE.parent  # a checkout, or site-packages
TRAIN = [str(SCRIPT)] if SCRIPT.exists() else ["-m", "rftmega", "train"]
TEMPLATE = Path(__file__).with_name("run.sbatch")
WAIT = 60  # seconds
RANKS = """# A rank that refuses leaves this file: of the others, which wait for it, srun would tell that they were killed.
export RFTMEGA_REFUSED={folder}/$SLURM_JOB_ID-refused
rm -f "$RFTMEGA_REFUSED"
# One task is one rank, and the command after `rank` is what it becomes. When one has ended, the others have {wait} s.
become='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"'
srun {srun} \\
    bash -c "$become" rank \\
    {train}
code=$?"""
SUPERVISORS = """# One task is the supervisor of one node, which starts the node's ranks. When a node fails, the others
# go on, and the node's supervisor is started again in case that it comes back.
export -f address_of
export RFTMEGA_ELASTIC_BEGAN=$began
become='exec "$@" --node "$SLURMD_NODENAME" --address "$(address_of "$SLURMD_NODENAME" 2> /dev/null)"'
ended() {{ [ {end} -nt "$began" ]; }}  # the run's supervisors have agreed on its end
supervise() {{
    for ((start = 1; start <= {starts}; start++)); do
        srun --nodelist="$1" --nodes=1 --ntasks=1 --output="{folder}/%j-$1.log" \\
            {srun} \\
            bash -c "$become" node \\
            {train}
        code=$?
        echo "$code" > "$began.$1"
        case $code in 0 | 2 | 76 | 77 | 138 | {saved}) return ;; esac
        ended && return
        echo "the supervisor of $1 ended with $code and is started again"
        sleep {pause}
        ended && return
    done
}}
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do supervise "$node" & done
wait
code=$(sort -n "$began".* | tail -n 1)
if ended; then code=$(sed -n 's/.*"code": \\([0-9]*\\).*/\\1/p' {end}); fi
rm -f "$began" "$began".*"""
STARTS, PAUSE = 100, 15  # of a supervisor that fails, and seconds between two of them
READ = (  # prefixes of the variables that the program and its libraries read
    *(
        "CUDA_",
        "FI_",
        "GLOO_",
        "HF_",
        "KMP_",
        "MKL_",
        "NCCL_",
        "NVTE_",
        "OMP_",
        "PYTORCH_",
        "RFTMEGA_",
        "TOKENIZERS_",
        "TORCH",
    ),
    *("TRANSFORMERS_", "TRITON_", "UCX_", "VLLM_", "WANDB_"),
)
HOST = ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "VIRTUAL_ENV")  # meaningless in a container
SET_BY_SLURM = ("CUDA_VISIBLE_DEVICES",)
SECRET = re.compile("TOKEN(?!IZERS_)|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
SECRET_IN_URL = re.compile(rf"://[^/\s@]+@|[?&][^=&]*({SECRET.pattern})[^=&]*=", re.IGNORECASE)


def main(given: list[str] | None = None) -> int:
    given = sys.argv[1:] if given is None else given
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", choices=("slurm", "local"), help="rftmega launch slurm --help lists its options"
    )
    command = parser.parse_args(given[:1]).command
    chosen = arguments(command).parse_intermixed_args(given[1:])  # does not support subcommands
    return exit_code_of(slurm, chosen, given) if command == "slurm" else exit_code_of(local, chosen)


def arguments(command: str) -> argparse.ArgumentParser:
    parser = OptionParser(
        prog=f"{Path(sys.argv[0]).name} {command}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", help="YAML file of options; rftmega train --help lists them")
    add(
        "overrides",
        nargs="*",
        metavar="option=value",
        default=[],
        help="dotted overrides, e.g. parallel.tensor=2",
    )
    if command == "local":
        add(
            "--processes",
            type=int,
            required=True,
            metavar="N",
            help="ranks, one a GPU where there are GPUs",
        )
        return parser
    add(
        "--nodes",
        type=int,
        metavar="N",
        help="nodes of the trainer; without --elastic it is needed",
    )
    add(
        "--elastic",
        default="",
        metavar="MIN:MAX",
        help="in place of --nodes: start with MAX nodes, and go on with at least MIN when nodes fail (docs/elastic.md)",
    )
    add("--gpus-per-node", type=int, default=0, metavar="G", help="0: the run is on CPUs (0)")
    add("--processes-per-node", type=int, metavar="P", help="ranks a node (as many as GPUs)")
    slurm_server_step.add_arguments(parser)
    add(
        "--cpus-per-process",
        type=int,
        default=0,
        metavar="C",
        help="cores of a rank; 0: the job has its nodes to itself (0)",
    )
    add(
        "--time",
        metavar="LIMIT",
        help="of one stretch, as 24:00:00; the run goes on in the next one (the partition's)",
    )
    add("--partition", metavar="NAME")
    add("--account", metavar="NAME")
    add("--job-name", metavar="NAME", help="(the last part of trainer.output)")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="=OPTION",
        help="a further option of sbatch, as --sbatch=--qos=high",
    )
    add("--container", metavar="IMAGE", help="train in this image (Slurm's pyxis), with its python")
    add(
        "--mounts",
        metavar="A:B,...",
        help="folders it sees (this checkout and the present folder, under their names)",
    )
    add("--python", metavar="PATH", help="the environment's on the nodes (this one's)")
    add(
        "--save-seconds",
        type=int,
        default=600,
        metavar="S",
        help="ranks are told to save so long before the limit (600)",
    )
    add(
        "--max-failures",
        type=int,
        default=3,
        metavar="N",
        help="with no checkpoint between them, the N-th is the last (3)",
    )
    add(
        "--file",
        type=Path,
        metavar="FILE",
        help="what is written (trainer.output/slurm/run.sbatch)",
    )
    add("--submit", action="store_true", help="call sbatch, too")
    return parser


def local(chosen: argparse.Namespace) -> int:
    command = [
        *TRAIN,
        chosen.config,
        *chosen.overrides,
        "--processes",
        str(chosen.processes),
    ]
    os.execv(sys.executable, [sys.executable, *command])


def slurm(chosen: argparse.Namespace, given: list[str]) -> int:
    """Checks the run, writes the sbatch file, and submits it with --submit. Returns the exit code.
    `chosen`: the parsed command line; `given`: its arguments as strings.
    """
    from rftmega import config as configuration
    from rftmega.run import preflight
    from rftmega.run.elastic.start import refusals
    from rftmega.run.hub import fetched
    from rftmega.runtime import device
    from rftmega.runtime.parallel.private import keep_private

    keep_private()  # the file contains this shell's environment
    if chosen.processes_per_node is None:
        chosen.processes_per_node = chosen.gpus_per_node
    _choose_nodes(chosen)
    servers = slurm_server_step.overrides(chosen, "of the job", "of its first node")
    config = fetched(configuration.load(chosen.config, [*chosen.overrides, *servers]))
    if found := problems(chosen, config):
        raise ConfigError.listing("This can't be started", found)
    processes = chosen.nodes * chosen.processes_per_node
    if chosen.elastic and (found := refusals(config, chosen.processes_per_node)):
        raise ConfigError.listing("This can't be an elastic run", found)
    preflight.preflight(
        config, processes, on=device.CUDA() if chosen.gpus_per_node else device.CPU()
    )
    folder = Path(config.trainer.output).resolve() / "slurm"
    target = (chosen.file or folder / "run.sbatch").resolve()
    latest = (
        Path(config.checkpoint.folder or f"{config.trainer.output}/checkpoints").resolve()
        / "latest"
    )
    paths = {"folder": folder, "target": target, "latest": latest}
    text = script(
        chosen,
        os.environ,
        **paths,
        saved=config.faults.requeue_code,
        command=["rftmega", "launch", *given],
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"{target} can't be written: {error.strerror}. Choose another trainer.output or --file."
        ) from error
    say = sys.stdout.write
    say(preflight.dry_run(config, processes) + "\n")
    if not config.checkpoint.every:
        say("restarts    begin anew: checkpoint.every=0 saves nothing\n")
    say(f"wrote       {target}\n")
    if chosen.submit:
        done = subprocess.run(
            ["sbatch", "--parsable", str(target)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ConfigError(f"sbatch refused {target}: {done.stderr.strip()}")
        job = done.stdout.strip().split(";")[0]
        say(f"submitted   job {job}\nlogs        {folder}/{job}.log, {job}-rank-0.log, ...\n")
        say(
            f"to stop it  scancel --signal=USR1 {job} saves and goes on later; scancel {job} ends it\n"
        )
    else:
        say(f"submit it   sbatch {shlex.quote(str(target))}\n")
    return 0


def _choose_nodes(chosen: argparse.Namespace) -> None:
    """Sets `chosen.nodes` to the most nodes of --elastic if it is given.

    Raises ConfigError unless exactly one of --nodes and --elastic is given.
    """
    from rftmega.run.elastic.start import limits_of

    if (chosen.nodes is None) == (not chosen.elastic):
        raise ConfigError("Give either --nodes N, or --elastic MIN:MAX.")
    if chosen.elastic and chosen.server_nodes:
        raise ConfigError(
            "--server-nodes has a fixed place in a job of --nodes. With --elastic, start servers in a job of their own "
            "(rftmega serve, rollout.server_list)."
        )
    if chosen.elastic:
        chosen.nodes = limits_of(chosen.elastic).most


def problems(chosen: argparse.Namespace, config: "RunConfig") -> list[str]:
    """Returns a message, with a remedy, for each problem of the nodes and of the file's contents.
    `chosen`: the parsed command line.
    """
    from rftmega.runtime.parallel.layout import nodes_of_engine

    found = []
    ranks, gpus = chosen.processes_per_node, chosen.gpus_per_node
    for name in ("nodes", "processes_per_node", "save_seconds", "max_failures"):
        if (value := getattr(chosen, name)) < 1:
            hint = " Give --gpus-per-node, or --processes-per-node on nodes without GPUs." * (
                name == "processes_per_node"
            )
            found.append(f"--{name.replace('_', '-')} {value} must be at least 1.{hint}")
    separate = config.strategy == "separate"
    elsewhere = bool(config.rollout.addresses or config.rollout.server_list)
    engines = config.rollout.servers * config.rollout.tensor if separate and not elsewhere else 0
    if engines and chosen.nodes > 1:
        found.append(
            "strategy=separate shares memory with its servers, so it works on --nodes 1 only. Give them nodes of their own with "
            "--server-nodes, or take strategy=colocated."
        )
    if gpus and ranks + engines > gpus:
        beside = f" and {engines} processes of vLLM's servers" if engines else ""
        found.append(
            f"{ranks} ranks{beside} a node are more than --gpus-per-node {gpus}; each needs its own."
        )
    found += slurm_server_step.problems(chosen, config)
    if config.algorithm.task == "rl" and not separate and ranks >= 1:
        tensor = config.rollout.tensor
        over = nodes_of_engine(tensor, ranks)
        if not over:
            found.append(
                f"rollout.tensor={tensor} does not fit a node's {ranks} ranks: an engine lies within a node, or on GPUs has "
                "whole nodes. Take a divisor, or a multiple."
            )
        elif over > 1 and not gpus:
            found.append(
                f"rollout.tensor={tensor} is more than a node's {ranks} ranks: on CPUs an engine's ranks share their host's "
                "memory. Take a divisor."
            )
    if chosen.time and seconds_of(chosen.time) <= chosen.save_seconds:
        found.append(
            f"--time {chosen.time} is not longer than --save-seconds {chosen.save_seconds}. Raise it, or lower that."
        )
    if chosen.mounts and not chosen.container:
        found.append("--mounts needs --container: without one a rank sees what its node sees.")
    for text in chosen.overrides:
        if SECRET_IN_URL.search(text) or holds_secrets(text.split("=")[0]) and "${" not in text:
            found.append(
                f"{text.split('=')[0]} holds a secret, and would be written down. Leave it in {chosen.config}."
            )
    for option in chosen.sbatch:
        if not option.startswith("--"):
            found.append(
                f"--sbatch={option} is no option. Write it as sbatch's manual does: --sbatch=--qos=high."
            )
    for path in (Path(config.trainer.output).resolve(), Path.cwd(), chosen.file or ""):
        if re.search(r"[^\w./+@:,=-]", str(path)):
            found.append(
                f"{path} has characters that Slurm reads otherwise in a file name. Take letters, digits and ./+@:,=-_"
            )
    return found


def seconds_of(limit: str) -> int:
    """Converts a Slurm time (minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS) to seconds.

    Raises ConfigError if `limit` has none of these forms.
    """
    whole = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not whole:
        raise ConfigError(f"--time {limit} is no time. Write HH:MM:SS or D-HH:MM:SS.")
    days, *parts = (None if part is None else int(part) for part in whole.groups())
    first, second, third = parts
    if days is not None:
        return ((days * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:
        return ((first or 0) * 60 + (second or 0)) * 60 + third
    return (first or 0) * 60 + (second or 0)


def script(
    chosen: argparse.Namespace,
    environment: Mapping[str, str],
    *,
    folder: Path,
    target: Path,
    latest: Path,
    saved: int,
    command: list[str],
) -> str:
    """Returns the text of the sbatch file.

    `chosen`: the parsed command line; `environment`: this shell's variables; `folder`: of the logs;
    `target`: the path of the file; `latest`: the file that every complete checkpoint updates;
    `saved`: exit code of a run that was asked to stop; `command`: the command line that made the
    file, for its comment.
    """
    written, left_out = captured(environment, HOST if not chosen.container else ())
    python = chosen.python or ("python" if chosen.container else sys.executable)
    train = shlex.join([python, "-u", *TRAIN, chosen.config, *chosen.overrides, *_of_node(chosen)])
    found_by = slurm_server_step.overrides(
        chosen, slurm_server_step.SERVER_LIST, slurm_server_step.LISTEN
    )
    shared, of_trainer = srun(chosen, folder)
    values = {
        "COMMAND": shlex.join(command).replace("\n", "\n# "),
        "FILE": shlex.quote(str(target)),
        "DIRECTIVES": "\n".join(f"#SBATCH {option}" for option in directives(chosen, folder)),
        "LEFT_OUT": f" Left out, as secrets (sbatch passes them on): {', '.join(left_out)}."
        if left_out
        else "",
        "ENVIRONMENT": "\n".join(
            f"export {name}={shlex.quote(value)}" for name, value in written.items()
        ),
        **_started(
            chosen,
            folder,
            options=" \\\n    ".join([*of_trainer, *shared]),
            train=" ".join([train, *found_by]),
            saved=saved,
        ),
        **slurm_server_step.values(chosen, folder, python, shared),
        "SAVED": saved,
        "LOGS": folder,
        "LATEST": shlex.quote(str(latest)),
        "MAX_FAILURES": chosen.max_failures,
    }
    return re.sub(r"{{(\w+)}}", lambda name: str(values[name[1]]), TEMPLATE.read_text())


def _of_node(chosen: argparse.Namespace) -> list[str]:
    """Returns the options of a node's supervisor; [] for a run that is not elastic."""
    if not chosen.elastic:
        return []
    return ["--elastic", chosen.elastic, "--processes", str(chosen.processes_per_node)]


def _started(
    chosen: argparse.Namespace, folder: Path, *, options: str, train: str, saved: int
) -> dict[str, str]:
    """Returns the parts of the file that start the run's ranks or supervisors, by placeholder.
    `options`: srun's; `train`: the command; `folder` and `saved`: see `script`.
    """
    ranks = chosen.processes_per_node
    if not chosen.elastic:
        size = chosen.nodes * ranks
        return {
            "MEETING": f"export MASTER_ADDR MASTER_PORT WORLD_SIZE={size} LOCAL_WORLD_SIZE={ranks}",
            "RUN": RANKS.format(folder=folder, wait=WAIT, srun=options, train=train),
            "LOG": "$SLURM_JOB_ID-rank-*.log",
        }
    end = shlex.quote(str(folder.parent / "elastic" / "end.json"))
    run = SUPERVISORS.format(
        folder=folder, end=end, starts=STARTS, srun=options, train=train, saved=saved, pause=PAUSE
    )
    return {
        "MEETING": f'began={folder}/$SLURM_JOB_ID-began\n: > "$began"',
        "RUN": run,
        "LOG": "$SLURM_JOB_ID-*.log",
    }


def directives(chosen: argparse.Namespace, folder: Path) -> list[str]:
    """Returns the options of the #SBATCH lines. `chosen`: the parsed command line; `folder`: of the
    logs.
    """
    limits = {"time": chosen.time, "partition": chosen.partition, "account": chosen.account}
    alone = ["--exclusive", "--mem=0"]
    if chosen.elastic:
        # of a range, Slurm may allocate the fewest
        nodes = [f"--nodes={chosen.nodes}", "--no-kill", "--ntasks-per-node=1"]
    else:
        nodes = [
            f"--nodes={chosen.nodes + chosen.server_nodes}",
            f"--ntasks-per-node={chosen.processes_per_node}",
        ]
    return [
        f"--job-name={chosen.job_name or folder.parent.name}",
        *nodes,
        *([f"--gpus-per-node={chosen.gpus_per_node}"] if chosen.gpus_per_node else []),
        *([f"--cpus-per-task={_cores_of_task(chosen)}"] if chosen.cpus_per_process else alone),
        *(f"--{name}={value}" for name, value in limits.items() if value),
        f"--chdir={Path.cwd()}",
        f"--output={folder}/%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=USR1@{chosen.save_seconds}",
        *chosen.sbatch,
    ]


def _cores_of_task(chosen: argparse.Namespace) -> int:
    """Returns the cores of one task: a rank, or all ranks of a node of an elastic run."""
    ranks = chosen.processes_per_node if chosen.elastic else 1
    return int(chosen.cpus_per_process) * ranks


def srun(chosen: argparse.Namespace, folder: Path) -> tuple[list[str], list[str]]:
    """Returns the srun options that all steps of the job share, and the options of the trainer's
    step alone. `chosen`: the parsed command line; `folder`: of the logs.
    """
    mounts = chosen.mounts or ",".join(
        f"{path}:{path}" for path in dict.fromkeys([str(ROOT), str(Path.cwd())])
    )
    cores = (
        f"--cpus-per-task={_cores_of_task(chosen)}"
        if chosen.cpus_per_process
        else "--cpu-bind=none"
    )
    inside = [
        f"--container-image={chosen.container}",
        f"--container-mounts={mounts}",
        f"--container-workdir={Path.cwd()}",
    ]
    shared = [cores, "--open-mode=append", *(inside if chosen.container else [])]
    of_trainer = [f"--wait={WAIT}", f"--output={folder}/%j-rank-%t.log"]
    if chosen.elastic:
        of_trainer = ["--overlap", "--no-kill"]
    return (
        [shlex.quote(option) for option in shared],
        [shlex.quote(option) for option in [*of_trainer, *slurm_server_step.placed(chosen)]],
    )


def captured(
    environment: Mapping[str, str], more: tuple[str, ...] = ()
) -> tuple[dict[str, str], list[str]]:
    """Returns the variables of `environment` that are written into the sbatch file, and the names
    of variables that are left out since they may be secrets; both sorted by name.

    These are the variables that the program and its libraries read, and those in `more`.
    """
    read = {
        name: value
        for name, value in sorted(environment.items())
        if (name.startswith(READ) or name in more) and name not in SET_BY_SLURM
    }
    secret = [
        name for name, value in read.items() if SECRET.search(name) or SECRET_IN_URL.search(value)
    ]
    return {name: value for name, value in read.items() if name not in secret}, secret


if __name__ == "__main__":
    sys.exit(main())
