"""What goes wrong says so, at once, and leaves nothing behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rftmega.runtime.parallel.folder_lock import FILE, locked
from tests.e2e.conftest import ROOT, Run, metrics_of, numbers_of, train_rl

# seconds until a run must have begun and have ended, beside much else on the machine
STARTED, ENDED = 600, 120


@pytest.fixture
def running(arithmetic: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of two ranks that would go on for long, caught in the middle of training."""
    output = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train_rl.py"), str(arithmetic / "run.yaml"), "--processes", "2", "trainer.steps=100000",
         "parallel.pipeline=2", f"trainer.output={output}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    deadline = time.monotonic() + STARTED
    metrics = output / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_text().count("\n") > 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "training did not start"
        time.sleep(0.1)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ranks_of(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    titled = {
        child: " ".join(child.cmdline())
        for child in psutil.Process(process.pid).children(recursive=True)
    }
    return {
        int(title.split()[-1]): child
        for child, title in titled.items()
        if title.startswith("rftmega rank")
    }


def assert_gone(ranks: dict[int, psutil.Process]) -> None:
    _, alive = psutil.wait_procs(ranks.values(), timeout=5)
    assert alive == []


@pytest.mark.ranks
def test_killing_one_rank_ends_the_others_within_30_seconds_and_names_it(
    running: subprocess.Popen[str], tmp_path: Path
) -> None:
    ranks = ranks_of(running)
    assert set(ranks) == {0, 1}
    # it outlives ranks that start again
    assert json.loads((tmp_path / "out" / FILE).read_text())["pid"] == running.pid
    begin = time.monotonic()
    ranks[1].kill()
    _, errors = running.communicate(timeout=ENDED)
    assert time.monotonic() - begin < 30
    assert running.returncode == 1
    assert f"rank 1 (pid {ranks[1].pid}) was killed by SIGKILL" in errors
    assert_gone(ranks)


@pytest.mark.ranks
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_terminate_leave_no_process_behind(
    stop: signal.Signals, running: subprocess.Popen[str]
) -> None:
    ranks = ranks_of(running)
    if stop == signal.SIGINT:
        os.killpg(running.pid, stop)  # a terminal sends Ctrl-C to all
    else:
        running.terminate()
    _, errors = running.communicate(timeout=ENDED)
    assert running.returncode == 128 + stop
    assert stop.name in errors
    assert "Traceback" not in errors
    assert_gone(ranks)


@pytest.mark.ranks
def test_a_second_run_in_the_folder_of_a_first_is_refused(
    arithmetic: Path, tmp_path: Path, train: Run
) -> None:
    output = tmp_path / "out"
    with locked(output, "run"):
        done = train(
            arithmetic / "run.yaml", f"trainer.output={output}", "trainer.steps=1", "--processes", 2
        )
    assert done.returncode == 2
    assert (
        f"{output} is in use by another run, process {os.getpid()} on {socket.gethostname()}, since 20"
        in done.stderr
    )
    assert not output.exists()


def bad_lines(arithmetic: Path, tmp_path: Path) -> str:
    bad = tmp_path / "bad.jsonl"
    lines = [
        '{"prompt": "1+1=", "label": "2"}',
        '{"prompt": "11111+11111=", "label": "1"}',
        "{prompt",
        '{"prompt": "1+1="}',
    ]
    bad.write_text("\n".join(lines) + "\n")
    return f"data.train={bad}"


def without_weights(arithmetic: Path, tmp_path: Path) -> str:
    shutil.copytree(
        arithmetic / "model", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )
    return f"model.path={tmp_path / 'model'}"


BAD = {
    "a prompt longer than the limit, a line that is not JSON, a label missing": (
        bad_lines,
        "bad.jsonl:2: the prompt has 12 tokens, rollout.max_prompt_tokens is 8",
        "bad.jsonl:3: not JSON",
        'bad.jsonl:4: no "label"'),
    "a model folder without weights": (without_weights, "holds no *.safetensors weights"),
    "a world size and layers that do not divide": (
        lambda a, t: "parallel.pipeline=3",
        "does not divide the 2 launched processes", "parallel.pipeline=3 does not divide the model's 4 layers"),
    "an unknown engine": (lambda a, t: "rollout.engine=vlm", "Choose one of: vllm, sglang, transformers, scripted"),
    "a typo": (lambda a, t: "trainer.step=1", "Did you mean trainer.steps?"),
}  # fmt: skip


FIRST, *OTHERS = BAD


@pytest.mark.parametrize(
    "what", [FIRST, *(pytest.param(what, marks=pytest.mark.ranks) for what in OTHERS)]
)
def test_bad_input_is_one_clear_error_and_nothing_is_written(
    what: str, arithmetic: Path, tmp_path: Path, train: Run
) -> None:
    make, *complaints = BAD[what]
    output = tmp_path / "out"
    done = train(
        arithmetic / "run.yaml",
        make(arithmetic, tmp_path),
        f"trainer.output={output}",
        "--processes",
        2,
    )
    assert done.returncode == 2
    for complaint in complaints:
        assert complaint in done.stderr
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert not output.exists()


@pytest.mark.ranks
def test_an_error_of_one_rank_alone_reaches_the_user(
    arithmetic: Path, tmp_path: Path, train: Run
) -> None:
    """The missing tensor belongs to the second stage: rank 0 never hears of it."""
    model = tmp_path / "model"
    shutil.copytree(arithmetic / "model", model)
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    done = train(
        arithmetic / "run.yaml", f"model.path={model}", "parallel.pipeline=2", "--processes", 2
    )
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert "holds no tensor 'model.layers.3.mlp.up_proj.weight'" in done.stderr


@pytest.mark.ranks
def test_a_rank_that_is_ten_times_as_slow_is_named_and_the_run_goes_on(
    arithmetic: Path, tmp_path: Path, train: Run
) -> None:
    options = [
        "--processes",
        2,
        "trainer.steps=4",
        "algorithm.updates_per_epoch=1",
        "trainer.max_tokens_per_micro_batch=4096",
        "data.eval=",
    ]
    done = train(arithmetic / "run.yaml", *options, f"trainer.output={tmp_path}", planted="slow")
    assert done.returncode == 0, done.stderr
    steps = metrics_of(tmp_path)[1:]
    assert [step["work_update_slowest"] for step in steps] == [1.0] * 4
    assert all(step["work_update_max"] > 10 * step["work_update_median"] for step in steps)
    assert (
        done.stdout.count(f"rank 1 on {socket.gethostname()} is slow: in update it worked for") == 1
    ), done.stdout
    assert f"rank 0 on {socket.gethostname()} is slow" not in done.stdout
    place = f"{ROOT / 'tests/e2e/planted.py'}:"
    assert any(
        "rank 1 on" in line and "stands still" in line and place in line
        for line in done.stdout.splitlines()
    )


SERVERS = ["--processes", 2, "strategy=separate", "rollout.engine=vllm", "rollout.servers=2", "rollout.max_batch=2",
           "rollout.cpu_cache_gib=0.05", "parallel.tensor=2", "data.eval=", "trainer.export=true"]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of a run with two vLLM servers."""
    output = tmp_path_factory.mktemp("undisturbed")
    done = train_rl(arithmetic / "run.yaml", *SERVERS, f"trainer.output={output}", timeout=900)
    assert done.returncode == 0, done.stderr
    return output


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["server", "core"])
def test_a_server_that_is_killed_in_a_generation_costs_the_run_nothing(
    what: str, undisturbed: Path, arithmetic: Path, tmp_path: Path, train: Run
) -> None:
    done = train(
        arithmetic / "run.yaml", *SERVERS, f"trainer.output={tmp_path}", planted=what, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("server 1 is asked nothing more: The vLLM server at") == 1, done.stdout
    assert "engines start again" not in done.stdout
    assert (tmp_path / "struck").read_text() == "32", "an answer was generated twice, or never"
    for ours, theirs in zip(numbers_of(tmp_path), numbers_of(undisturbed), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5), ours["step"]
    struck, whole = (
        load_file(output / "policy/model-00001-of-00001.safetensors")
        for output in (tmp_path, undisturbed)
    )
    assert struck.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(struck[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.ranks
def test_ctrl_c_in_the_demo_leaves_no_process_behind(arithmetic: Path, tmp_path: Path) -> None:
    """The demo waits for its run to end its ranks, however often Ctrl-C is pressed."""
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'examples/arithmetic')!r}); import demo; demo.run(*sys.argv[1:])"
    arguments = ["train_rl.py", str(arithmetic / "run.yaml"), "--processes", "2", "trainer.steps=100000",
                 f"trainer.output={tmp_path / 'out'}"]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True,
                               start_new_session=True, cwd=ROOT)  # fmt: skip
    metrics = tmp_path / "out/metrics.jsonl"
    deadline = time.monotonic() + STARTED
    while not (metrics.is_file() and metrics.read_text().count("\n") > 1):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    ranks = ranks_of(process)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
    _, errors = process.communicate(timeout=ENDED)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert_gone(ranks)
