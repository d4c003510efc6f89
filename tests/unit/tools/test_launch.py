"""The file for sbatch: what it asks Slurm for, what a rank is told, and what happens after each
end.

On Slurm: tests/slurm.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rftmega.runtime.parallel.layout import nodes_of_engine
from rftmega.tools import launch
from tests.tiny_models import save_tiny

SRUN = """#!/bin/bash
echo "srun $*" >> calls
for word; do case $word in --nodelist=*) export SLURMD_NODENAME=${word#--nodelist=} ;; esac; done
if [[ "$*" == *" serve "* ]]; then
    while [[ $1 == --* ]]; do shift; done
    for node in 0 1; do SLURM_NODEID=$node "$@"; done
    touch served
    exec sleep 60
fi
if [ -n "${RFTMEGA_SERVER_LIST:-}" ]; then until [ -e served ]; do sleep 0.05; done; fi # a trainer needs servers
while [[ $1 == --* ]]; do shift; done
for task in 0 1 2 3; do SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) "$@"; done
exit "${SRUN_CODE:-0}"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> calls
case "$*" in
"show hostnames n[1-2]") printf 'n1\\nn2\\n' ;;
"show hostnames n[1-4]") printf 'n1\\nn2\\nn3\\nn4\\n' ;;
"--oneliner show node n"?) echo "NodeName=n1 CPUs=4 NodeAddr=10.0.0.${4#n} NodeHostName=n1" ;;
esac
"""
RANK = """#!/usr/bin/env python3
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG",
         "RFTMEGA_SERVER_KEY")
print(json.dumps({name: os.environ.get(name) for name in names} | {"arguments": sys.argv[1:]}))
"""


SERVERS = [
    *("rollout.engine=vllm", "strategy=separate", "rollout.transport=network"),
    *("--server-nodes", "2"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config, its model and data; the working directory, with a Slurm of a few lines on PATH."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "rank": RANK}.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    save_tiny(tmp_path / "model", "qwen3")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (tmp_path / "run.yaml").write_text("""
model: {path: model}
data: {train: train.jsonl}
rollout: {engine: scripted, max_prompt_tokens: 8, max_response_tokens: 8}
trainer: {output: out}
""")
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(launch.READ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


def write(*more: str, code: int = 0, nodes: tuple[str, ...] = ("--nodes", "2")) -> str:
    """The file's text."""
    given = ["slurm", "run.yaml", *nodes, *more]
    assert (
        launch.main(given if "--gpus-per-node" in more else [*given, "--processes-per-node", "2"])
        == code
    )
    return Path("out/slurm/run.sbatch").read_text() if code == 0 else ""


def run(code: int = 0, job: int = 7, nodes: str = "n[1-2]") -> "subprocess.CompletedProcess[str]":
    slurm = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": nodes, "SRUN_CODE": str(code)}
    return subprocess.run(
        ["bash", "out/slurm/run.sbatch"],
        env=os.environ | slurm,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def asked(text: str) -> list[str]:
    return [
        line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")
    ]


def test_sbatch_is_asked_for_nodes_a_restart_and_a_signal_in_time(folder: Path) -> None:
    options = asked(
        write(
            "--gpus-per-node",
            "8",
            "--time",
            "1-00:00:00",
            "--partition",
            "gpu",
            "--sbatch=--qos=high",
        )
    )
    assert options == [
        "--job-name=out", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--exclusive", "--mem=0",
        "--time=1-00:00:00", "--partition=gpu", f"--chdir={folder}", f"--output={folder}/out/slurm/%j.log",
        "--open-mode=append", "--requeue", "--signal=USR1@600", "--qos=high",
    ]  # fmt: skip


def test_others_may_not_read_the_environment_in_the_file_nor_the_logs(folder: Path) -> None:
    before = os.umask(0o022)
    try:
        assert "\numask o=" in write().partition("srun")[0]
    finally:
        os.umask(before)
    assert [
        oct(path.stat().st_mode & 0o777)
        for path in map(Path, ("out/slurm/run.sbatch", "out/slurm"))
    ] == ["0o640", "0o750"]


def test_bash_and_shellcheck_find_nothing(folder: Path) -> None:
    text = write(
        'reward.format_pattern=it\'s $HOME "here"', "reward.format=1", "--container", "image:1"
    )
    subprocess.run(["bash", "-n", "out/slurm/run.sbatch"], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "out/slurm/run.sbatch"], check=True)
    assert "{{" not in text


def test_every_rank_is_told_who_it_is_and_where_all_meet(folder: Path) -> None:
    awkward = 'reward.format_pattern=it\'s $HOME "here"; exit 1'
    write(awkward, "reward.format=1", "--python", str(folder / "bin/rank"))
    done = run()
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [
        ("0", "0"),
        ("1", "1"),
        ("2", "0"),
        ("3", "1"),
    ]
    for rank in ranks:
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["MASTER_ADDR"]) == (
            "4",
            "2",
            "10.0.0.1",
        )
        # below the ports that Linux gives out by itself
        assert 20000 <= int(rank["MASTER_PORT"]) < 30000
        assert rank["arguments"] == [
            "-u",
            str(launch.ROOT / "train_rl.py"),
            "run.yaml",
            awkward,
            "reward.format=1",
        ]
    assert f"--output={folder}/out/slurm/%j-rank-%t.log" in Path("calls").read_text()
    assert done.returncode == 0


def test_servers_have_nodes_of_their_own_and_the_trainer_finds_them(folder: Path) -> None:
    text = write(*SERVERS, "--servers-per-node", "4", "--python", str(folder / "bin/rank"))
    assert {"--nodes=4", "--ntasks-per-node=2"} < set(asked(text))
    subprocess.run(["bash", "-n", "out/slurm/run.sbatch"], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "out/slurm/run.sbatch"], check=True)
    done = run(nodes="n[1-4]")
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    servers = [each for each in told if "serve" in each["arguments"]]
    trainer = [each for each in told if "serve" not in each["arguments"]]
    server_list = f"{folder}/out/slurm/7-servers.txt"
    for each, address in zip(servers, ("10.0.0.3", "10.0.0.4"), strict=True):
        assert each["arguments"] == [
            *("-u", "-m", "rftmega", "serve", "run.yaml"), *SERVERS[:3], "--servers=4",
            *(f"--logs={folder}/out/slurm", "--listen", address, "--server-list", server_list),
        ]  # fmt: skip
    assert len(trainer) == 4
    for each in trainer:
        assert (each["WORLD_SIZE"], each["MASTER_ADDR"]) == ("4", "10.0.0.1")
        assert each["arguments"][-2:] == [
            f"rollout.server_list={server_list}",
            "rollout.listen=10.0.0.1",
        ]
    (key,) = {each["RFTMEGA_SERVER_KEY"] for each in told}
    assert len(key) == 64 and key not in text
    steps = [line for line in Path("calls").read_text().splitlines() if line.startswith("srun")]
    of_servers, of_trainer = sorted(steps, key=lambda line: " serve " not in line)
    assert "--nodes=2 --relative=2 --ntasks=2 --ntasks-per-node=1" in of_servers
    assert "--nodes=2 --relative=0 --ntasks=4 --ntasks-per-node=2" in of_trainer


def test_the_environment_is_written_down_and_secrets_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = {"HF_TOKEN": "s3cr3t-1", "WANDB_API_KEY": "s3cr3t-2", "VLLM_PASSWORD": "s3cr3t-3", "NCCL_SECRET": "s3cr3t-4",
              "HF_ENDPOINT": "https://me:s3cr3t-5@hub", "HF_URL": "http://h/?api_key=s3cr3t-6", "OTHER": "s3cr3t-7"}  # fmt: skip
    for name, value in hidden.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_DEBUG", "it's $INFO")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    text = write("--python", str(folder / "bin/rank"))
    assert "s3cr3t" not in text
    assert "export TOKENIZERS_PARALLELISM=false" in text
    monkeypatch.delenv("NCCL_DEBUG")
    assert '"NCCL_DEBUG": "it\'s $INFO"' in run().stdout


@pytest.mark.parametrize(
    ("code", "again", "ends_with"),
    [
        (0, False, 0),
        (75, True, 0),
        (2, False, 2),
        pytest.param(76, False, 76, marks=pytest.mark.ranks),
        pytest.param(77, False, 77, marks=pytest.mark.ranks),
        (1, True, 0),
        pytest.param(137, True, 0, marks=pytest.mark.ranks),
    ],
)
def test_what_a_restart_mends_goes_back_into_the_queue(
    code: int, again: bool, ends_with: int, folder: Path
) -> None:
    write("--python", "true")
    done = run(code)
    assert ("scontrol requeue 7" in Path("calls").read_text()) == again
    assert done.returncode == ends_with


def test_a_rank_that_refuses_ends_the_job_also_where_srun_tells_of_those_that_it_killed(
    folder: Path,
) -> None:
    """While rank 1 refuses, the others wait for it in a collective."""
    program = folder / "bin/rank"
    train = f"{sys.executable} {launch.ROOT / 'train_rl.py'} {folder / 'broken.yaml'}"
    program.write_text(
        f"#!/bin/bash\nif [ $RANK = 1 ]; then WORLD_SIZE=1 PYTHONPATH={launch.ROOT} {train}; exit $?; fi\n"
    )
    (folder / "broken.yaml").write_text("model: {}")
    write("--python", str(program))
    done = run(137)
    assert (done.returncode, "refused: the error is in" in done.stdout) == (2, True), done
    assert "scontrol requeue" not in Path("calls").read_text()
    program.write_text("#!/bin/bash\n")  # mended: the refusal is no longer true
    assert "starts again: failed with 137" in run(137).stdout


def test_a_rank_that_was_asked_to_stop_before_it_could_listen_is_no_failure(folder: Path) -> None:
    write("--python", "true", "--max-failures", "1")
    assert run(128 + signal.SIGUSR1).returncode == 0
    assert "scontrol requeue 7" in Path("calls").read_text()


def test_the_code_of_a_run_that_saved_is_the_configs(folder: Path) -> None:
    write("--python", "true", "--max-failures", "1", "checkpoint.every=1", "faults.requeue_code=99")
    assert [run(99).returncode, run(75).returncode] == [0, 75]


def test_a_fault_that_comes_again_after_the_same_checkpoint_ends_it_and_being_stopped_does_not(
    folder: Path,
) -> None:
    write("--python", "true", "--max-failures", "2")
    assert [run(75).returncode for _ in range(3)] == [0, 0, 0]
    assert run(137).returncode == 0
    assert run(137).returncode == 137
    latest = Path("out/checkpoints/latest")
    latest.parent.mkdir()
    latest.write_text("step_10\n")
    assert [run(137).returncode, run(1).returncode] == [0, 1]
    assert run(137, job=8).returncode == 0  # another job counts for itself


ELASTIC = ("--elastic", "1:2", "checkpoint.every=1")
END = """#!/bin/bash
mkdir -p out/elastic; echo '{"code": CODE, "message": "why"}' > out/elastic/end.json
"""


def test_of_an_elastic_run_each_node_has_a_supervisor_that_knows_its_name_and_address(
    folder: Path,
) -> None:
    text = write("--python", str(folder / "bin/rank"), "--cpus-per-process", "3", nodes=ELASTIC)
    assert asked(text)[1:4] == ["--nodes=2", "--no-kill", "--ntasks-per-node=1"]
    assert "--cpus-per-task=6" in asked(text)
    subprocess.run(["bash", "-n", "out/slurm/run.sbatch"], check=True)
    assert "{{" not in text and "WORLD_SIZE" not in text
    done = run()
    assert done.returncode == 0, done
    told = {
        tuple(json.loads(line)["arguments"][-8:])
        for line in done.stdout.splitlines()
        if line.startswith("{")
    }
    assert told == {
        ("--elastic", "1:2", "--processes", "2", "--node", f"n{n}", "--address", f"10.0.0.{n}")
        for n in (1, 2)
    }
    assert sorted(path.name for path in Path("out/slurm").iterdir()) == ["run.sbatch"]


@pytest.mark.parametrize(
    ("code", "ends_with", "said"),
    [
        (0, 0, "finished"),
        (75, 0, "starts again: saved"),
        (1, 0, "starts again: failed with 1"),
        (76, 76, "diverged"),
    ],
)
def test_an_elastic_run_ends_as_its_supervisors_agreed_whatever_became_of_a_node(
    code: int, ends_with: int, said: str, folder: Path
) -> None:
    program = folder / "bin/rank"
    program.write_text(END.replace("CODE", str(code)))
    write("--python", str(program), nodes=ELASTIC)
    done = run(137)
    assert done.returncode == ends_with and said in done.stdout, done
    assert Path("calls").read_text().count("--nodelist=n1") == 1


def test_a_supervisor_that_fails_is_started_again_and_one_that_refuses_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of an earlier start says nothing of this one."""
    monkeypatch.setattr(launch, "STARTS", 3)
    monkeypatch.setattr(launch, "PAUSE", 0)
    end = Path("out/elastic/end.json")
    end.parent.mkdir(parents=True)
    end.write_text('{"code": 0, "message": "finished"}')
    os.utime(end, (1, 1))
    write("--python", "true", nodes=ELASTIC)
    done = run(137)
    calls = Path("calls").read_text()
    assert calls.count("--nodelist=n1") == calls.count("--nodelist=n2") == 3
    assert "the supervisor of n1 ended with 137 and is started again" in done.stdout
    assert "starts again: failed with 137" in done.stdout and done.returncode == 0
    Path("calls").unlink()
    assert run(2).returncode == 2
    assert Path("calls").read_text().count("--nodelist") == 2


@pytest.mark.parametrize(
    ("nodes", "complaint"),
    [
        ((), "Give either --nodes N, or --elastic MIN:MAX"),
        (("--nodes", "2", "--elastic", "1:2"), "Give either --nodes N, or --elastic MIN:MAX"),
        (("--elastic", "3:2"), "as 2:4"),
        (("--elastic", "1:2"), "--elastic needs checkpoint.every"),
        ((*ELASTIC, *SERVERS), "start servers in a job of their own"),
    ],
)
def test_an_elastic_job_that_cannot_be_is_refused(
    nodes: tuple[str, ...], complaint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(nodes=nodes, code=2)
    assert complaint in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["parallel.tensor=3"], "does not divide the 4 launched processes"),
        (["rollout.tensor=4"], "rollout.tensor=4 is more than a node's 2 ranks: on CPUs"),
        (["--nodes", "3", "rollout.tensor=3"], "rollout.tensor=3 does not fit a node's 2 ranks"),
        (["strategy=separate", "rollout.engine=vllm"], "--nodes 1 only"),
        (
            ["--server-nodes", "1", "rollout.engine=vllm"],
            "--server-nodes 1 needs strategy=separate",
        ),
        (
            [*SERVERS, "--gpus-per-node", "2", "--servers-per-node", "3"],
            "--servers-per-node 3 of rollout.tensor=1 processes are more than --gpus-per-node 2",
        ),
        ([*SERVERS, "--servers-per-node", "0"], "--servers-per-node 0 must be at least 1"),
        (["--time", "10:00"], "--time 10:00 is not longer than --save-seconds 600"),
        (["--time", "soon"], "--time soon is no time"),
        (["--mounts", "/a:/a"], "--mounts needs --container"),
        (["--sbatch=qos=high"], "--sbatch=qos=high is no option"),
        (["--gpus-per-node", "0"], "--processes-per-node 0 must be at least 1"),
        (
            ["--gpus-per-node", "2", "--processes-per-node", "4"],
            "4 ranks a node are more than --gpus-per-node 2",
        ),
        (["trainer.output=my runs"], "has characters that Slurm reads otherwise"),
        (["reward.remote_url=http://me:s3cr3t@host"], "reward.remote_url holds a secret"),
        (
            ["environment.type=tools", "environment.mcp=[{name: a, command: [b, s3cr3t]}]"],
            "environment.mcp holds a secret",
        ),
        (["trainer.step=1"], "Did you mean trainer.steps?"),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_written(
    more: list[str], complaint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    write(*more, code=2)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and complaint in said
    assert "s3cr3t" not in said
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("example", "nodes"),
    [
        pytest.param("llama-3-70b", 8, marks=pytest.mark.ranks),
        pytest.param("qwen3-235b-a22b", 32, marks=pytest.mark.ranks),
        ("deepseek-v3", 64),
    ],
)
def test_the_examples_lack_nothing_but_weights_and_data(
    example: str,
    nodes: int,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines of 16 and 32 devices have whole nodes of 8."""
    monkeypatch.chdir(Path(launch.__file__).parents[1])
    config = f"examples/planning/{example}/run.yaml"
    given = [
        "slurm",
        config,
        f"--nodes={nodes}",
        "--gpus-per-node=8",
        f"trainer.output={folder / 'out'}",
    ]
    assert launch.main(given) == 2
    said = capsys.readouterr().err.splitlines()[1:]
    assert len(said) == 2, said
    assert any("data.train must be given" in line for line in said)
    assert any("holds no *.safetensors weights" in line for line in said)


@pytest.mark.parametrize(
    ("ranks", "node", "nodes"),
    [(1, 8, 1), (8, 8, 1), (16, 8, 2), (32, 8, 4), (12, 8, 0), (3, 8, 0)],
)
def test_an_engine_lies_within_a_node_or_has_whole_ones(ranks: int, node: int, nodes: int) -> None:
    assert nodes_of_engine(ranks, node) == nodes


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:30", 7230),
        ("1-0", 86400),
        ("1-01:30", 91800),
        ("2-00:00:01", 172801),
    ],
)
def test_slurms_times_are_read_as_slurm_reads_them(limit: str, seconds: int) -> None:
    assert launch.seconds_of(limit) == seconds


def test_a_container_gets_its_own_python_and_none_of_the_hosts_paths(folder: Path) -> None:
    text = write("--container", "image:1", "--mounts", "/data:/data")
    assert "--container-image=image:1" in text and "--container-mounts=/data:/data" in text
    assert f"python -u {launch.ROOT}/train_rl.py" in text
    assert "export PATH=" not in text and "export PYTHONPATH=" not in text


def test_gpu_nodes_are_planned_where_there_is_no_gpu(folder: Path) -> None:
    """On a CPU vLLM refuses latent attention of this size; the nodes have GPUs."""
    shutil.rmtree("model")
    save_tiny(Path("model"), "deepseek-v3")
    write("rollout.engine=vllm", "--gpus-per-node", "2")
    write("rollout.engine=vllm", code=2)
