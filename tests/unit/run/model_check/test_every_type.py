"""`rftmega check` of a tiny model of each type of transformers that backend=fsdp trains: random weights
are no problem of a folder.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rftmega.examples.arithmetic import warm_start
from tests.families import TABLE, save_tiny_of

FEW = ("rwkv", "doge")
KINDS = [
    kind if kind in FEW else pytest.param(kind, marks=pytest.mark.ranks)
    for kind in (
        row["type"] for row in json.loads(TABLE.read_text())["rows"] if row["verdict"] == "ok"
    )
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_model_has_no_problem(kind: str, tmp_path: Path) -> None:
    save_tiny_of(kind, tmp_path)
    warm_start.tokenizer().save_pretrained(tmp_path)
    command = [sys.executable, "-m", "rftmega", "check", str(tmp_path), "--backend", "fsdp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    states = {line[:22].strip(): line[22:31].strip() for line in done.stdout.splitlines()}
    problems = {name for name, state in states.items() if state == "problem"}
    assert problems <= {"stop tokens"}, done.stdout
    assert states.keys() >= {"log-probs, fsdp", "packing, fsdp", "export, fsdp"}, done.stderr
