"""`rftmega.train` in one interpreter, again and again: after an error, as in a notebook's cell that is
mended and run once more, and after an end.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, metrics_of, train_rl

SCRIPT = """
import json, sys, warnings
import rftmega

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of an import of its own
    import megatron.core  # after rftmega, which must be enough

folder, chosen, backend = sys.argv[1:]
wrong = None


def length(completions, **columns):
    if isinstance(wrong, BaseException):
        raise wrong
    return [float(len(text)) for text in completions]


def cell(error, output, engine, *more):
    global wrong
    wrong = error
    if engine == "vllm":
        more = ("rollout.cpu_cache_gib=0.05", *more)
    try:
        overrides = [
            f"rollout.engine={engine}", f"backend={backend}", f"trainer.output={folder}/{output}",
            "trainer.steps=1", "data.eval=", "logging.prometheus_port=" + sys.argv.port, *more,
        ]
        result = rftmega.train(f"{folder}/run.yaml", overrides=overrides, rewards=[length])
        print(json.dumps(["done", result.exit_code]), flush=True)
    except BaseException as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)


class Arguments(list):
    port = "0"


sys.argv = Arguments(sys.argv)
import random, socket

for port in random.sample(range(20_000, 30_000), 100):  # no process gets these unasked
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)):
            sys.argv.port = str(port)
            break
cell(ValueError("a bug"), "first", chosen)
cell(None, "second", chosen)
cell(None, "never", chosen, "trainer.stepz=1")
cell(KeyboardInterrupt(), "third", "scripted")  # its start takes less time
cell(SystemExit(3), "fourth", "scripted")
cell(None, "fifth", chosen)
"""


def run_cells(folder: Path, tmp_path: Path, *given: str) -> "subprocess.CompletedProcess[str]":
    (tmp_path / "cells.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, str(tmp_path / "cells.py"), str(folder), *given],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(
    ("engine", "backend"),
    [
        pytest.param("vllm", "megatron", marks=pytest.mark.ranks),
        pytest.param("transformers", "fsdp", marks=pytest.mark.ranks),
    ],
)
def test_a_run_succeeds_after_runs_that_failed_in_the_same_interpreter(
    engine: str, backend: str, arithmetic: Path, tmp_path: Path
) -> None:
    done = run_cells(arithmetic, tmp_path, engine, backend)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [name for name, _ in found] == [
        *("RewardError", "done", "ConfigError", "KeyboardInterrupt", "RewardError", "done")
    ], done.stdout + done.stderr
    assert "length raised ValueError: a bug" in found[0][1]
    assert "length raised SystemExit: 3" in found[4][1]
    assert done.returncode == 0
    for noise in ("Traceback", "Warning", "Error in sys.excepthook"):
        assert noise not in done.stderr, done.stderr
    second, fifth = (metrics_of(arithmetic / name)[-1] for name in ("second", "fifth"))
    for name in ("reward", "loss", "grad_norm", "response_length"):
        assert second[name] == fifth[name], "what failed between them changed the numbers"


@pytest.mark.ranks
def test_an_error_on_the_command_line_is_its_message_and_nothing_else(
    arithmetic: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def f(completions, **columns):\n    return [1 / 0]\n")
    done = train_rl(
        arithmetic / "run.yaml",
        *("rollout.engine=vllm", "rollout.cpu_cache_gib=0.05", "data.eval="),
        *(f"reward.functions=[{tmp_path / 'mine.py'}:f]", f"trainer.output={tmp_path / 'out'}"),
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "error: reward.functions: f raised ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "Invalid process group" not in done.stderr
